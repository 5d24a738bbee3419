"""What a run's directory says of its size, its work and its data, beside the keys of its config."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.validate import show
from ngpt_train.study.compare.key_kinds import UNKNOWN, Absent, brought, is_harmless, value_of
from ngpt_train.study.compare.runs import Run, common_budgets

Arms = Mapping[str, Sequence[Run]]

# What a start notes in run.json of itself, and not of what was computed.
_OF_THE_START = ("time", "step", "job", "kernels", "damaged", "changed", "n_params", "init", "host")


@dataclass
class Seen:
    """The values of one key, or of one quantity, by arm and budget."""

    key: str
    by_arm: dict[str, dict[int, list[Any]]] = field(default_factory=dict)

    def of(self, arm: str) -> list[Any]:
        return distinct(itertools.chain.from_iterable(self.by_arm[arm].values()))

    @property
    def known(self) -> bool:
        return all(value is not UNKNOWN for arm in self.by_arm for value in self.of(arm))

    @property
    def arms_differ(self) -> bool:
        """Whether two arms do, at a budget that both have; in all, where they share none."""
        return any(
            identities(one[budget]) != identities(other[budget])
            for ones, others in itertools.combinations(self.by_arm, 2)
            for one, other in [_comparable(self.by_arm[ones], self.by_arm[others])]
            for budget in one
        )

    def all(self) -> dict[str, list[Any]]:
        return {arm: self.of(arm) for arm in self.by_arm}

    def shown(self) -> tuple[dict[str, list[Any]], str]:
        """The values of each arm. Where arms that differ have the same ones in all, those of the largest budget at
        which they differ, and the words that say so."""
        if len({frozenset(identities(values)) for values in self.all().values()}) > 1:
            return self.all(), ""
        of_budget: dict[int, dict[str, list[Any]]] = {}
        for arm, found in self.by_arm.items():
            for budget, values in found.items():
                of_budget.setdefault(budget, {})[arm] = distinct(values)
        at = max(b for b, of in of_budget.items() if len({frozenset(identities(x)) for x in of.values()}) > 1)
        return of_budget[at], f"at {at:,} tokens"


def _comparable(one: Mapping[int, list[Any]], other: Mapping[int, list[Any]]) -> tuple[dict[int, list[Any]], ...]:
    """The values of two arms by the budgets that both have; all of them as of one budget, where they share none."""
    if shared := one.keys() & other.keys():
        return {budget: one[budget] for budget in shared}, {budget: other[budget] for budget in shared}
    return tuple({0: list(itertools.chain.from_iterable(found.values()))} for found in (one, other))


def see(key: str, arms: Arms, values: Callable[[Run], list[Any]]) -> Seen:
    """What `values` says of the runs of each arm and budget."""
    budgets = common_budgets(arms)
    seen = Seen(key)
    for arm, runs in arms.items():
        of_arm = seen.by_arm.setdefault(arm, {})
        for run in runs:
            if found := values(run):
                of_arm.setdefault(budgets[run.path], []).extend(found)
    return seen


def without_shared_budget(arms: Arms) -> list[tuple[str, str]]:
    """Pairs of arms that have no budget in common."""
    budgets = common_budgets(arms)
    of_arm = {arm: {budgets[run.path] for run in runs} for arm, runs in arms.items()}
    return [pair for pair in itertools.combinations(arms, 2) if not of_arm[pair[0]] & of_arm[pair[1]]]


def excess(arms: Arms) -> float:
    """By how much more tokens an arm's runs have been trained at most than another's, at what counts as one budget."""
    of_run = {run.path: run.steps * (tokens_per_step(run) or 1) for runs in arms.values() for run in runs}
    budgets = common_budgets(arms)
    tokens = [[n for path, n in of_run.items() if budgets[path] == budget] for budget in set(budgets.values())]
    return max((max(found) / min(found) - 1 for found in tokens), default=0.0)


def tokens_per_step(run: Run) -> int | None:
    """Targets of a step over all ranks, padding included."""
    rows, context = run.config.get("train.batch_rows"), run.config.get("model.context")
    if isinstance(rows, int) and isinstance(context, int):
        return rows * context
    tokens = run.config.get("train.batch_tokens")
    return tokens if isinstance(tokens, int) else None


def n_params(run: Run) -> int | None:
    return run.facts.get("n_params")


def n_params_without_embeddings(run: Run) -> int | None:
    """Parameters but for the embeddings of the input, of the source of an encoder-decoder, and of the output."""
    size, width = run.config.get("model.vocab_size"), run.config.get("model.d_model")
    total = n_params(run)
    if total is None or not isinstance(size, int) or not isinstance(width, int):
        return None
    matrices = 1 + (not run.config.get("model.tied_embeddings", False)) + ("model.source_context" in run.config)
    return total - matrices * size * width


def flops_per_token(run: Run) -> float | None:
    """As the records have it: FLOPs so far over the tokens of so many steps."""
    tokens = tokens_per_step(run)
    for record in reversed([*run.train, *run.evals]):
        flops, step = record.get("flops"), record.get("step")
        if flops is not None and tokens and step:
            return float(round(flops / (step * tokens)))
    return None


def clipped_share(run: Run) -> float | None:
    """Share of all steps whose gradient was clipped, 0 without clipping; None where no record says it."""
    shares = [record["clipped"] or 0.0 for record in run.train if "clipped" in record]
    return sum(shares) / len(shares) if shares else None


def rows_hash(run: Run) -> str | None:
    """Which rows the last validation had."""
    found = run.evals[-1].get("rows_hash") if run.evals else None
    if found is None and run.rows is not None:
        return run.rows.rows_hash
    return found


def data_hashes(run: Run) -> dict[int, str]:
    """Which rows a run has read, by the tokens in them."""
    return {x["tokens"]: x["data_hash"] for x in run.train if x.get("tokens") is not None and x.get("data_hash")}


def first_differences(arms: Arms) -> Iterator[tuple[int, Run, Run, int, list[Any]]]:
    """Of runs of one seed, of one arm or else of two: the seed, both, the tokens and the hashes at which their rows
    first differ."""
    (_, ones), *others = arms.items()
    pairs = itertools.product(ones, others[0][1]) if others else itertools.combinations(ones, 2)
    hashes = {id(run): data_hashes(run) for runs in arms.values() for run in runs}
    for one, other in pairs:
        if one.seed != other.seed:
            continue
        a, b = hashes[id(one)], hashes[id(other)]
        for tokens in sorted(a.keys() & b.keys()):
            if a[tokens] != b[tokens]:
                yield one.seed, one, other, tokens, [a[tokens], b[tokens]]
                break


def deviations(key: str, arms: Arms) -> str:
    """Which arms do not have what their architecture and recipe bring, and what that would be."""
    usual = {arm: (value_of(runs[0].config, key), brought(runs[0].config, key)) for arm, runs in arms.items()}
    return "; ".join(
        f"the recipe of {arm} brings {show(expected)}"
        for arm, (value, expected) in usual.items()
        if not isinstance(expected, Absent) and expected != AUTO and not same(value, expected)
    )


def facts_of(run: Run) -> dict[str, list[Any]]:
    """Code, versions, machine and data of the starts whose steps are part of the run, by name."""
    found: dict[str, list[Any]] = {}
    starts = _starts(run)
    for start in starts:
        flat = {name: value for name, value in start.items() if name not in _OF_THE_START}
        flat |= {f"versions.{name}": version for name, version in (flat.pop("versions", None) or {}).items()}
        for name, value in flat.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    changes = [change for start in starts for change in start.get("changed") or []]
    found["allowed_changes"] = [sorted({str(change.get("key")) for change in changes})]
    found["rollbacks"] = [len(run.rollbacks)]
    return found


def _starts(run: Run) -> list[dict[str, Any]]:
    """Without those whose steps were all taken again by a later one."""
    steps = [start.get("step") or 0 for start in run.starts]
    later = [*steps, math.inf][1:]
    return [start for start, step, next_step in zip(run.starts, steps, later, strict=True) if next_step > step]


def identity(value: Any) -> Any:
    if isinstance(value, Absent):
        return id(value)
    return json.dumps(float(value) if type(value) is int else value, sort_keys=True, default=str)


def same(one: Any, other: Any) -> bool:
    return identity(one) == identity(other)


def identities(values: Iterable[Any]) -> set[Any]:
    return {identity(value) for value in values}


def distinct(values: Iterable[Any]) -> list[Any]:
    return list({identity(value): value for value in values}.values())


def ordered(values: list[Any]) -> list[Any]:
    """By size, where all are numbers."""
    return sorted(values) if all(type(value) in (int, float) for value in values) else values


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list):
        return [plain(x) for x in value]
    if isinstance(value, Absent) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def ratio(values: Iterable[Any]) -> float | None:
    numbers = list(values)
    if not numbers or any(type(x) not in (int, float) or not 0 < x < math.inf for x in numbers):
        return None
    return float(max(numbers) / min(numbers))


def why_not_comparable(one: Run, other: Run) -> str:
    """What makes the losses of two runs say nothing about each other; empty where they do."""
    hashes = rows_hash(one), rows_hash(other)
    if hashes[0] == hashes[1] is not None:
        return ""
    objectives = [value_of(run.config, "data.objective") for run in (one, other)]
    if objectives[0] != objectives[1]:
        return "one predicts the next token and the other continues the beginning of a document"
    if other_tokenizer(one, other):
        return (text := _other_text(one, other)) and f"it was validated on other text, by {text}"
    if differ(one, other, "data_fingerprint"):
        return f"it was validated on other text: rows_hash {hashes[1]} and {hashes[0]}, and other fingerprints of data"
    # Other rows of one text, or rows that nobody knows, are a confound, which `examine` names.
    known = None not in (one.facts.get("data_fingerprint"), other.facts.get("data_fingerprint"))
    text = "" if known or None in hashes else _other_text(one, other)
    return text and f"it was validated on other text, by {text}: rows_hash {hashes[1]} and {hashes[0]}"


def _other_text(one: Run, other: Run) -> str:
    """How the text of two runs differs by their configs; empty where it does not."""
    keys = [key for key in {**one.config, **other.config} if key.startswith("data.") and not is_harmless(key)]
    text = ("kind", "path", "repo", "revision", "split", "files", "mixture", "text_field", "val_fraction", "val_files")
    differing = [key for key in keys if key.removeprefix("data.") in text]
    return ", ".join(key for key in differing if value_of(one.config, key) != value_of(other.config, key))


def other_tokenizer(one: Run, other: Run) -> bool:
    """By the fingerprints; where one is not known, by the configs, unless both were validated on the same tokens."""
    fact = "tokenizer_fingerprint"
    if None not in (one.facts.get(fact), other.facts.get(fact)) or rows_hash(one) == rows_hash(other) is not None:
        return differ(one, other, fact)
    return any(
        value_of(one.config, key) != value_of(other.config, key) for key in ("tokenizer.kind", "tokenizer.vocab_size")
    )


def differ(one: Run, other: Run, fact: str) -> bool:
    values = one.facts.get(fact), other.facts.get(fact)
    return None not in values and values[0] != values[1]


def all_same(runs: Iterable[Run], fact: Callable[[Run], Any]) -> bool:
    values = {fact(run) for run in runs}
    return len(values) == 1 and None not in values
