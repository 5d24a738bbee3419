"""The keys optim.* and schedule.*: the optimizer, and the learning rate over the steps.

`optim.lr_table` has learning rates by scale, context and budget:

    tiny: {256: 2.0e-2}                                     # a rate, whatever the budget
    0.5b:
      1024:
        - {tokens: 5.24e9, lr: 2.5e-3, source: who found it, and how}
        - {tokens: 105e9, lr: 1.0e-3, source: why it may do, extrapolation: true}

An entry has `lr`. It may have `tokens` or `steps`, the budget of the runs that it was found with; `source`; `model`,
the architecture that it was found for; and `extrapolation`, true where it was found for something else or not at all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Union

from ngpt_train.config.keys import AUTO, COUNT, COUNT_OR_0, Conflict, FloatOrAuto, IntOrAuto, Table, key
from ngpt_train.config.validate import Origin, keep_later, mistake

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

BUDGETS = ("tokens", "steps")
TEXTS = ("source", "model")
FIELDS = ("lr", *BUDGETS, *TEXTS, "extrapolation")
# Budgets so near have the same rate: rates are tried in steps of two or so, and the best one falls with a small power
# of the budget.
NEAR = 2.0


def look_up(row: Mapping[int, Any], model: str, context: int, run: Mapping[str, int]) -> tuple[float, str]:
    """The learning rate of one scale for a run of `model` at `context`, whose tokens and steps are `run`; and in words
    where it is from.

    Of the contexts the longest within the run's counts, else the shortest there is; of its entries the one whose budget
    is nearest by its logarithm, of two as near the larger. An entry for another context or architecture, or for budgets
    further than NEAR from the run's, is an extrapolation, as is one that says so.
    """
    nearest = max((each for each in row if each <= context), default=min(row))
    entries = row[nearest] if isinstance(row[nearest], list) else [{"lr": row[nearest]}]
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
            elif name == "extrapolation" and not isinstance(value, bool):
                yield f"{place}: {name} must be true or false"
        budgets.add(tuple(name for name in BUDGETS if name in entry))
        unit, budget = _budget(entry)
        if budget in seen:
            yield f"{place}: an entry before it has {unit}: {budget:g} as well"
        seen |= {budget} if budget else set()
    if len(budgets) > 1 or (len(entries) > 1 and budgets == {()}) or ("tokens", "steps") in budgets:
        yield f"{where}: all entries have tokens, or all have steps; a single one may have neither"


def _is_positive(value: Any) -> bool:
    """A number that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


@dataclass
class RateReferenceConfig:
    """The run in which optim.lr was tuned. optim.lr_rule carries it to others."""

    batch_tokens: Union[int, None] = key(None, "Its tokens a step; null is this run's.", **COUNT)
    n_layers: Union[int, None] = key(None, "Its n_layers; null is this run's.", **COUNT)
    tokens: Union[int, None] = key(None, "Its tokens in all; null is this run's.", minimum=1, maximum=10**15)


@dataclass
class OptimConfig:
    """The optimizer. The recipe of the architecture sets these."""

    may_change: ClassVar = ("lr_table", "lr_source")

    name: str = key("adamw", "Optimizer; adam never decays.", choices=("adam", "adamw"))
    lr: FloatOrAuto = key(
        AUTO, "Peak learning rate; auto looks up lr_table by scale, context and budget.", above=0, maximum=1000
    )
    # {scale: {context: lr or entries}}, which problem_of checks: OmegaConf fails to merge two typed dicts of dicts.
    lr_table: dict[str, Any] = key(
        {},
        "lr by scale, then context, then tokens or steps of the whole run. The longest context within model.context "
        "counts, else the shortest there is; of its entries the one with the nearest budget, by its logarithm.",
        table=Table(problem_of, "{tiny: {256: 0.001}}", "Set optim.lr, or write a recipe in YAML"),
    )
    lr_source: str = key("", "Where optim.lr is from, which the log says. With lr=auto the entry of lr_table says it.")
    lr_rule: str = key(
        "none",
        "none: optim.lr is the rate. hyperp: the rate of all parameters is optim.lr sqrt(B / B_0) sqrt(L_0 / L) "
        "(T / T_0)^-0.32, with B tokens a step, L layers, T tokens in all, and optim.reference's (arXiv 2603.28743, "
        "where it is MuonH's).",
        choices=("none", "hyperp"),
    )
    reference: RateReferenceConfig = field(default_factory=RateReferenceConfig)
    betas: list[float] = key([0.9, 0.95], "Adam's decay rates of the first and second moment.")
    eps: float = key(1e-8, "Adam's epsilon.", above=0, maximum=1)
    weight_decay: float = key(
        0.1, "Decoupled weight decay of the matrices; nGPT takes only 0.", minimum=0, maximum=1000
    )
    z_loss: float = key(
        0.0,
        "Adds this times logsumexp(logits)^2 to a target's loss in training, for example 1e-4, which keeps logits from "
        "drifting; 0: none. The losses of metrics.jsonl and of validations are without it; train records have its "
        "part as z_loss.",
        minimum=0,
        maximum=1000,
    )
    label_smoothing: float = key(
        0.0,
        "Share of a target's label that training spreads evenly over all tokens of the vocabulary, as torch's "
        "cross_entropy does; 0: none. The losses of metrics.jsonl and of validations are without it.",
        minimum=0,
        below=1,
    )
    clip_norm: Union[float, None] = key(
        1.0, "Largest global gradient norm; larger gradients are scaled down to it. null: no clipping.", above=0
    )
    storage: str = key(
        "fp32",
        "How the blocks' matrices and their moments are kept between steps. bf16: rounded after each, as parameters in "
        "bf16 without an fp32 master are, by which public comparisons trained their baseline; it saves no memory here.",
        choices=("fp32", "bf16"),
    )
    ema_decay: Union[float, None] = key(
        None,
        "Keeps a moving average of the weights: after each step ema <- ema_decay ema + (1 - ema_decay) w, for example "
        "0.999. `evaluate` and `generate` use it with evaluate.weights=ema. null: none.",
        above=0,
        below=1,
    )

    def resolve(self, config: Config) -> None:
        """Looks up lr, and where it is from, if it is auto. Call when the batch is resolved. Raises ConfigError."""
        if self.lr == AUTO:
            self.lr, self.lr_source = self.from_table(config)

    def from_table(self, config: Config) -> tuple[float, str]:
        """The learning rate of lr_table for a config whose batch is resolved, and where it is from. Raises ConfigError
        where there is none."""
        row: dict[int, Any] | None = self.lr_table.get(config.scale.name)
        if not row:
            scales = ", ".join(self.lr_table) or "no scale"
            problem = f"the recipe's table has no learning rate for scale={config.scale.name}, only for {scales}"
            raise mistake(f"optim.lr=auto: {problem}", "Set optim.lr=NUMBER")
        steps, context = config.train.steps, config.model.context
        tokens = steps * config.train.rows_per_step * context
        return look_up(row, config.model.name, context, {"tokens": tokens, "steps": steps})

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that exclude each other."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield "optim.betas", "not two numbers >= 0 and < 1", "For example optim.betas=[0.9,0.95]"
        if self.weight_decay and self.name == "adam":
            yield "optim.weight_decay optim.name", "adam never decays", "Set optim.name=adamw or optim.weight_decay=0"
        given = [name for name, value in vars(self.reference).items() if value is not None]
        if self.lr_rule == "none" and given:
            fix = "Set optim.lr_rule=hyperp, or leave optim.reference out"
            yield f"optim.reference.{given[0]} optim.lr_rule", "no rule carries the rate", fix


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step."""

    may_change: ClassVar = ("warmup_tokens",)  # the steps that it stands for are compared

    kind: str = key(
        "cosine",
        "Shape after the warmup: cosine, linear, wsd (stable, then linear decay), constant, inverse_sqrt (falls as 1 / "
        "sqrt(step), whatever train.steps is; a warmup of 0 counts as 1), or ramp (no warmup: grows from 0 to optim.lr "
        "over train.steps, to see at which rate the loss explodes).",
        choices=("cosine", "wsd", "linear", "constant", "inverse_sqrt", "ramp"),
    )
    warmup_steps: IntOrAuto = key(
        AUTO,
        "Linear warmup; auto is min(2000, 10 % of train.steps), of a ramp 0. One that a file sets is auto where a "
        "train.steps that is set later leaves no room for it.",
        **COUNT_OR_0,
    )
    warmup_tokens: Union[int, None] = key(
        None,
        "Linear warmup in tokens, for example 375000000: rounded up to whole steps, it replaces warmup_steps.",
        minimum=0,
        maximum=1_000_000_000_000_000,
    )
    final_lr: float = key(
        0.0, "Learning rate that cosine, linear and wsd end at; the others take only 0.", minimum=0, maximum=1000
    )
    final_share: Union[float, None] = key(
        None,
        "schedule.final_lr as a share of optim.lr, for example 0.1, so that it follows a rate that is tuned.",
        minimum=0,
        maximum=1,
    )
    decay_fraction: float = key(0.2, "wsd: last part of train.steps that decays.", above=0, maximum=1)

    def auto_warmup(self, steps: int) -> int:
        """The warmup that auto stands for in a run of `steps` steps."""
        return 0 if self.kind == "ramp" else min(2000, steps // 10)

    def resolve(self, config: Config, origins: Mapping[str, Origin]) -> None:
        """Sets final_lr and warmup_steps. Of final_lr and final_share, and of warmup_steps and warmup_tokens, the one
        that was set last counts. Call when the batch and optim.lr are resolved. Raises ConfigError."""
        train = config.train
        keep_later(config, "schedule.final_lr schedule.final_share", "both set where the schedule ends", origins)
        if self.final_share is not None:
            self.final_lr = self.final_share * float(config.optim.lr)
        names = "schedule.warmup_steps schedule.warmup_tokens"
        keep_later(config, names, "both set the warmup", origins)
        if self.warmup_tokens is not None:
            self.warmup_steps = -(-self.warmup_tokens // (train.rows_per_step * config.model.context))
        # A warmup belongs to the steps it was written for: where fewer were set later, it is auto.
        later = origins["train.steps"].order > max(origins[name].order for name in names.split())
        if self.warmup_steps == AUTO or (later and int(self.warmup_steps) >= train.steps):
            self.warmup_steps, self.warmup_tokens = self.auto_warmup(train.steps), None

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """Keys that exclude each other. `config` is resolved."""
        train, lr = config.train, config.optim.lr
        if int(self.warmup_steps) >= train.steps:
            problem = "the warmup leaves no step at the full learning rate"
            fix = f"Set schedule.warmup_steps below {train.steps}; auto would be {self.auto_warmup(train.steps)}"
            in_tokens = ""
            if self.warmup_tokens is not None:
                in_tokens, tokens = "schedule.warmup_tokens ", train.rows_per_step * config.model.context
                fix = f"Set schedule.warmup_tokens to {(train.steps - 1) * tokens} or less, a step has {tokens}"
            yield f"{in_tokens}schedule.warmup_steps train.steps", problem, fix
        if self.kind == "ramp" and self.warmup_steps:
            key = "schedule.warmup_steps" if self.warmup_tokens is None else "schedule.warmup_tokens"
            yield f"{key} schedule.kind", "the whole run is a warmup", f"Set {key}=0"
        if self.kind in ("constant", "inverse_sqrt", "ramp") and self.final_lr:
            problem = "this kind falls to no learning rate of one's choice"
            key = "schedule.final_lr" if self.final_share is None else "schedule.final_share"
            yield f"{key} schedule.kind", problem, f"Set {key}=0, or another kind"
        if self.decay_fraction != ScheduleConfig.decay_fraction and self.kind != "wsd":
            fix = "Set schedule.kind=wsd, or leave schedule.decay_fraction out"
            yield "schedule.decay_fraction schedule.kind", "only wsd decays in a last part of the steps", fix
        if self.final_lr > float(lr):
            yield "schedule.final_lr optim.lr", "ends above the peak", f"Set schedule.final_lr to {lr} or less"
