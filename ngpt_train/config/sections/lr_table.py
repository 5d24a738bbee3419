"""optim.lr_table: learning rates by scale, context and budget.

    tiny: {256: 2.0e-2}                                     # a rate, whatever the budget
    0.5b:
      1024:
        - {tokens: 5.24e9, lr: 2.5e-3, source: who found it, and how}
        - {tokens: 105e9, lr: 1.0e-3, source: why it may do, extrapolation: true}

An entry has `lr`. It may have `tokens` or `steps`, the budget of the runs that it was found with; `source`; `model`,
the architecture that it was found for; `optim`, the optimizer, by default Adam or AdamW; and `extrapolation`, true
where it was found for something else or not at all. Rates of another optimizer say nothing.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

ADAMS = ("adam", "adamw")
OPTIMIZERS = (*ADAMS, "muon", "normuon", "adamh", "muonh")
BUDGETS = ("tokens", "steps")
TEXTS = ("source", "model", "optim")
FIELDS = ("lr", *BUDGETS, *TEXTS, "extrapolation")
# Budgets so near have the same rate: rates are tried in steps of two or so, and the best one falls with a small power
# of the budget.
NEAR = 2.0


def found_for(row: Mapping[int, Any], optimizer: str) -> dict[int, Any]:
    """The contexts and entries of one scale for an optimizer; an entry that names none is for Adam and AdamW."""
    wanted = ADAMS if optimizer in ADAMS else (optimizer,)
    listed = {context: x if isinstance(x, list) else [{"lr": x}] for context, x in row.items()}
    found = {context: [x for x in entries if x.get("optim", "adam") in wanted] for context, entries in listed.items()}
    return {context: entries for context, entries in found.items() if entries}


def look_up(row: Mapping[int, Any], model: str, context: int, run: Mapping[str, int]) -> tuple[float, str]:
    """The learning rate of one scale for a run of `model` at `context`, whose tokens and steps are `run`; and in words
    where it is from. row: of `found_for`.

    Of the contexts the longest within the run's counts, else the shortest there is; of its entries the one whose budget
    is nearest by its logarithm, of two as near the larger. An entry for another context or architecture, or for budgets
    further than NEAR from the run's, is an extrapolation, as is one that says so.
    """
    nearest = max((each for each in row if each <= context), default=min(row))
    entries = row[nearest]
    entry = min(entries, key=lambda entry: (round(_distance(entry, run), 6), -_budget(entry)[1]))
    beyond = all(_distance(entry, run) > math.log(NEAR) for entry in entries) and not _between(entries, run)
    elsewhere = nearest != context or beyond
    for_another = entry.get("model", model) != model

    unit, budget = _budget(entry)
    amount = f"{_amount(budget, unit)} at " if budget else ""
    text = f"{entry.get('source', 'optim.lr_table')} ({amount}context {nearest})"
    if entry.get("extrapolation", False) or elsewhere or for_another:
        text = f"an extrapolation: {text}"
    if for_another:
        text += f"; it is {entry['model']}'s"
    if elsewhere:
        of_run = f"{_amount(run[unit], unit)} at " if budget else ""
        text += f"; this run has {of_run}context {context}"
    return float(entry["lr"]), text


def _budget(entry: Mapping[str, Any]) -> tuple[str, float]:
    """Its unit and number; 0 of an entry for any budget."""
    return next(((unit, float(entry[unit])) for unit in BUDGETS if unit in entry), ("tokens", 0.0))


def _distance(entry: Mapping[str, Any], run: Mapping[str, int]) -> float:
    """Between the logarithms of the budgets."""
    unit, budget = _budget(entry)
    return abs(math.log(run[unit] / budget)) if budget else 0.0


def _between(entries: list[dict[str, Any]], run: Mapping[str, int]) -> bool:
    """Whether the run's budget is between those of the entries."""
    units, budgets = zip(*map(_budget, entries), strict=True)
    return bool(min(budgets) <= run[units[0]] <= max(budgets))


def _amount(budget: float, unit: str) -> str:
    for size, word in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
        if budget >= size and unit == "tokens":
            return f"{budget / size:.3g} {word}tokens"
    return f"{budget:,.0f} {unit.removesuffix('s') if budget == 1 else unit}"


def problem_of(table: Mapping[Any, Any]) -> str | None:
    """The first mistake in a table, and where it is; None for a correct one."""
    return next(_problems(table), None)


def _problems(table: Mapping[Any, Any]) -> Iterator[str]:
    for scale, row in table.items():
        if not isinstance(scale, str) or not isinstance(row, dict):
            yield f"{scale}: must be the name of a scale, and then {{CONTEXT: LR}}"
            continue
        for context, entries in row.items():
            where = f"{scale}, {context!r}"  # '64' is text
            if type(context) is not int or context <= 0:
                yield f"{where}: a context is an integer > 0"
            elif not isinstance(entries, list):
                if not _is_positive(entries):
                    yield f"{where}: must be a number > 0, or a list such as [{{tokens: 5.0e+9, lr: 0.001}}]"
            else:
                yield from _problems_of_entries(where, entries)


def _problems_of_entries(where: str, entries: list[Any]) -> Iterator[str]:
    if not entries:
        yield f"{where}: the list has no entry"
    budgets, seen = set(), set()
    for number, entry in enumerate(entries, start=1):
        place = f"{where}, entry {number}"
        if not isinstance(entry, dict) or "lr" not in entry:
            yield f"{place}: must be a mapping with lr"
            continue
        for name, value in entry.items():
            if name not in FIELDS:
                yield f"{place}: {name} is none of {', '.join(FIELDS)}"
            elif name in ("lr", *BUDGETS) and not _is_positive(value):
                yield f"{place}: {name} must be a number > 0"
            elif name in TEXTS and not (isinstance(value, str) and value):
                yield f"{place}: {name} must be text"
            elif name == "optim" and value not in OPTIMIZERS:
                yield f"{place}: optim is none of {', '.join(OPTIMIZERS)}"
            elif name == "extrapolation" and not isinstance(value, bool):
                yield f"{place}: {name} must be true or false"
        budgets.add(tuple(name for name in BUDGETS if name in entry))
        unit, budget = _budget(entry)
        if (budget, entry.get("optim")) in seen:
            yield f"{place}: an entry before it has {unit}: {budget:g} as well"
        seen |= {(budget, entry.get("optim"))} if budget else set()
    if len(budgets) > 1 or (len(entries) > 1 and budgets == {()}) or ("tokens", "steps") in budgets:
        yield f"{where}: all entries have tokens, or all have steps; a single one may have neither"


def _is_positive(value: Any) -> bool:
    """A number that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max
