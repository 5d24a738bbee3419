"""The points of a study, each a run: its arguments and config, its result, and equal runs of other studies."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from ngpt_train.config.architectures import all_keys
from ngpt_train.config.compose import load_config
from ngpt_train.config.keys import TABLES
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import read_yaml, redact, to_dict, what_differs
from ngpt_train.config.validate import flatten, mistake, show
from ngpt_train.core.constants import DIVERGED, TRANSLATED
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import read_json
from ngpt_train.core.recorded import TEXT, Record, checked, compared, read_end, read_records
from ngpt_train.study.definition import LR, SAME_BUDGET, Study, Value, config_dir_of, merged, name_of, text_of
from ngpt_train.study.descent import Grid
from ngpt_train.study.tuning import changed, is_number, sorted_values

DONE, FAILED, UNFINISHED, WAITING = "done", "failed", "unfinished", "waiting"
FAILURES = "failures"  # directory of a study with FAILURES/<run>.json for each run that crashed too often
ENDED = "done"  # the reason in exit.json after the planned end
_OUT_OF_MEMORY = "DeviceMemoryError"
_LONGEST = 180  # characters of a directory's name; a run's name may have 200
_MANY_STEPS = 1_000_000_000
_OF_A_STEP = ("train.batch_rows", "train.batch_tokens", "model.context")  # keys that decide the tokens of a step
# Keys that a resume may change. In a study they make another run, or another validation.
_COUNT_TOO = (
    *("run.init_from", "train.steps", "train.stop_at", "optim.lr", "schedule.warmup_steps"),
    *("eval.every", "eval.rows", "eval.tokens", "eval.budget", "eval.contexts", "eval.beams"),
    *("data.path", "data.val_files", "tokenizer.path"),
)


@dataclass(frozen=True)
class Point:
    """A run of a study. values: (tuned key, value) by key."""

    arm: str
    budget: int  # tokens
    values: tuple[tuple[str, Value], ...]
    seed: int

    @property
    def directory(self) -> str:
        """The name of its run directory: `ngpt-819200-lr0.02-seed0`."""
        values = [f"{key.removeprefix('optim.')}{text_of(value)}" for key, value in self.values]
        name = "-".join([self.arm, str(self.budget), *values, f"seed{self.seed}"])
        if len(name) > _LONGEST:
            name = f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        return name


@dataclass(frozen=True)
class Result:
    """state: DONE; FAILED for `reason`, without a loss; UNFINISHED, if it has begun; WAITING. loss: of the validation
    at the end, in the study's metric."""

    point: Point
    state: str
    loss: float | None
    reason: str
    run: Path

    @property
    def is_final(self) -> bool:
        return self.state in (DONE, FAILED)


Results = Mapping[Point, Result]


class Runs:
    """The runs of a study. The methods that compose a configuration raise ConfigError."""

    def __init__(self, study: Study) -> None:
        self.study = study
        # Composing takes some 50 ms, and each turn of the loop asks again.
        self.steps = cache(self._steps)
        self.config = cache(lambda point: self._composed(self.arguments(point)))
        self.start = cache(lambda arm, budget: float(self._at(arm, budget).optim.lr))  # of the arm's recipe
        self.grids = cache(lambda arm, budget: {key: self._grid(arm, budget, key) for key in study.keys_of(arm)})
        self._of_arm = cache(self._of_an_arm)

    def directory(self, point: Point) -> Path:
        return self.study.runs / point.directory

    def arguments(self, point: Point) -> tuple[str, ...]:
        """The arguments of `train`, each key once."""
        study = self.study
        words = ",".join(f"'{word}'" for word in (point.arm, f"budget {point.budget}", f"seed {point.seed}"))
        return merged(
            [f"logging.wandb.group={study.name}", f"logging.wandb.tags=[{words}]"],
            self._of_arm(point.arm),
            [f"train.steps={self.steps_of(point)}"],
            [f"{key}={show(value)}" for key, value in point.values],
            [f"run.seed={point.seed}", f"run.root={study.runs}", f"run.name={point.directory}"],
        )

    def first_point(self, arm: str, budget: int) -> Point:
        """The point with the recipe's learning rate, the first value of each further key, and the first seed."""
        values = {LR: self.start(arm, budget)}
        values |= {key: self._first(arm, budget, key, said) for key, said in self.study.keys_of(arm).items()}
        return Point(arm, budget, sorted_values(values), self.study.seeds[0])

    def check(self) -> None:
        """Composes the configuration of every arm at every budget, with each value of every further key."""
        for arm in self.study.arms:
            before = 0
            for budget in self.study.budgets:
                try:
                    before = self._check(arm, budget, before)
                except ConfigError as error:
                    raise ConfigError(f"arm {arm}, budget {budget}: {error}") from None

    def _check(self, arm: str, budget: int, before: int) -> int:
        """The steps of a budget. before: the steps of the next smaller one."""
        steps = self.steps(arm, budget)
        if steps <= before * (1 + SAME_BUDGET):
            problem = f"study.budgets: {budget} tokens are {steps} steps, the budget before {before}"
            raise mistake(problem, f"Budgets within {SAME_BUDGET:.0%} of each other are one: name it once")
        first = self.first_point(arm, budget)
        config = self.config(first)
        config.data.check_val_range()
        if self.study.metric in TRANSLATED and config.eval.beams is None:
            problem = f"study.metric={self.study.metric}: the runs would translate nothing"
            raise mistake(problem, "Set eval.beams=5 in shared, or choose another metric")
        for key, said in self.study.keys_of(arm).items():
            if isinstance(said, tuple):
                for value in self.grids(arm, budget)[key].values[1:]:
                    self._check_value(first, key, value)
        return steps

    def _check_value(self, first: Point, key: str, value: Value) -> None:
        """Composes the configuration of a point whose key has this value. A key of the schedule is composed with each
        tuned batch, because a larger batch has fewer steps."""
        other = _with(first, key, value)
        config, tokens = self.config(other), self._tokens(first)
        if key in _OF_A_STEP and abs(self._tokens(other) - tokens) > SAME_BUDGET * tokens:
            problem = f"study.tune: {key}={show(value)}: whole steps have {self._tokens(other)} tokens, not {tokens}"
            problem += f" as with {show(dict(first.values)[key])}, so that compare would take them for another budget"
            raise mistake(problem, f"Leave the value out, or set study.budgets to multiples of {_of_a_step(config)}")
        batches = _OF_A_STEP if key.startswith("schedule.") else ()
        for batch in [name for name in batches if name in self.study.keys_of(first.arm)]:
            for size in self._grid(first.arm, first.budget, batch).values[1:]:
                self.config(_with(other, batch, size))

    def _tokens(self, point: Point) -> int:
        return self.steps_of(point) * _of_a_step(self.config(point))

    def _at(self, arm: str, budget: int) -> Config:
        """The configuration of the arm's recipe at this budget."""
        return self._composed(merged(self._of_arm(arm), [f"train.steps={self.steps(arm, budget)}"]))

    def _first(self, arm: str, budget: int, key: str, said: Any) -> Any:
        """The first of a key's listed values, or the arm's own number, which a factor goes out from."""
        if isinstance(said, tuple):
            return carried(key, said[0], budget / self.study.search_order[0])
        try:
            value = attrgetter(key)(self._at(arm, budget))
        except AttributeError:
            fix = f"Name it below the arms that have it: {{NAME: {{{key}: {said:g}}}}}"
            raise mistake(f"study.tune: {key}: arm {arm} has no such key", fix) from None
        if type(value) not in (int, float) or value <= 0:
            fix = f"Set {key} to a number above 0 in the arm, or list the values to try"
            raise mistake(f"study.tune: {key}: {show(value)} of arm {arm} is no number to multiply by {said:g}", fix)
        return value

    def _grid(self, arm: str, budget: int, key: str) -> Grid:
        """A key's values. By a factor: as far on both sides as the config allows, in six digits, like names of runs."""
        said, most = self.study.keys_of(arm)[key], self.study.max_points
        if isinstance(said, tuple):
            ratio = budget / self.study.search_order[0]
            return Grid(tuple(dict.fromkeys(carried(key, value, ratio) for value in said[:most])))
        first, start = self.first_point(arm, budget), self._first(arm, budget, key, said)
        values = [start]
        for factor in (1 / said, said):
            for power in range(1, (most - 1) // 2 + 1):
                value = float(f"{start * factor**power:.6g}")
                value = value if float in all_keys()[key].types else round(value)
                if value in (0, *values) or not self._allows(first, key, value):
                    break
                values.append(value)
        return Grid(tuple(values), outward=True)

    def _allows(self, first: Point, key: str, value: Value) -> bool:
        with suppress(ConfigError):
            self._check_value(first, key, value)
            return True
        return False

    def steps_of(self, point: Point) -> int:
        """The steps of a point, whose tuned batch has as many tokens in all as any other."""
        of_a_step = tuple((key, value) for key, value in point.values if key in _OF_A_STEP)
        return self.steps(point.arm, point.budget, of_a_step)

    def _steps(self, arm: str, budget: int, of_a_step: tuple[tuple[str, Value], ...] = ()) -> int:
        """Steps of `budget` tokens, rounded. of_a_step: tuned values that decide the tokens of a step."""
        # No warmup is too long for this many steps. `config` checks it against the real number.
        chosen = [f"train.steps={_MANY_STEPS}", *(f"{key}={show(value)}" for key, value in of_a_step)]
        config = self._composed(merged(self._of_arm(arm), chosen))
        tokens = _of_a_step(config)
        steps = round(budget / tokens)
        if steps < 1:
            problem = f"study.budgets: {budget} tokens are less than a step of arm {arm}, which has {tokens}"
            raise mistake(problem, f"Set study.budgets to multiples of {tokens}, or a smaller train.batch_rows")
        return steps

    def _of_an_arm(self, arm: str) -> tuple[str, ...]:
        """With run.init_from, where the study names no model, it is that run's, as `finetune` has it."""
        arguments = merged(self.study.shared, self.study.arms[arm])
        given = {name_of(argument): argument.partition("=")[2] for argument in arguments}
        if given.get("run.init_from", "null") == "null" or "model" in given:
            return arguments
        from ngpt_train.training.checkpoint.taken_over import with_trained_model  # slow to import

        return merged(with_trained_model(arguments))

    def _composed(self, arguments: Sequence[str]) -> Config:
        return load_config(arguments, config_dir_of(self.study.options), world_size=1)

    def result(self, point: Point, run: Path | None = None) -> Result:
        """The result of a point, from its directory, or `run`, of an equal run. Raises DataError for a damaged file."""
        run, steps = run or self.directory(point), self.steps_of(point)
        has_begun = (run / "config.yaml").is_file()
        end = read_end(run) if has_begun else None
        if end is not None and (failure := _failure(end)):
            return Result(point, FAILED, None, failure, run)
        if end is not None and end["reason"] == ENDED and end["step"] == steps:
            loss = _end_loss(run, steps, self.study.metric)
            if loss is not None:
                return Result(point, DONE, loss, "", run)
            return Result(point, FAILED, None, f"its validation loss at step {steps} is {loss}", run)
        if (record := failure_record(run)).exists():
            return Result(point, FAILED, None, reason_of(record), run)
        return Result(point, UNFINISHED if has_begun else WAITING, None, "", run)

    def equal_run(self, point: Point) -> Path | None:
        """An equal run of another study below study.root, or of another arm, if possible an ended one."""
        found, config = [], self.config(point)
        for path in sorted(self.study.root.glob(f"*/runs/*-seed{point.seed}/config.yaml")):
            run = path.parent
            if run.is_symlink() or run == self.directory(point):
                continue
            stored = _stored(path, path.stat().st_mtime_ns)
            if stored is None or _is_clearly_another(stored, config) or differences(stored, config):
                continue
            found.append(self.result(point, run))
        found.sort(key=lambda result: (result.state != DONE, not result.is_final))
        return found[0].run if found else None


def _with(point: Point, key: str, value: Value) -> Point:
    return replace(point, values=changed(point.values, key, value))


def _of_a_step(config: Config) -> int:
    """Tokens."""
    return config.train.rows_per_step * config.model.context


def carried(key: str, value: Any, ratio: float) -> Any:
    """The value at a budget `ratio` times as large: a warm-up keeps its share of the run."""
    of_run = key in ("schedule.warmup_steps", "schedule.warmup_tokens") and is_number(value) and value
    return max(1, round(value * ratio)) if of_run else value


def failure_record(run: Path) -> Path:
    """The file for a run that crashed too often. It lies outside of the run's directory, which only the run changes."""
    return run.parent.parent / FAILURES / f"{run.name}.json"


def reason_of(record: Path) -> str:
    """The reason in the record of a run's crashes. Raises DataError."""
    return str(checked(read_json(record), {"reason": TEXT}, str(record)).get("reason") or "it crashed")


def _failure(end: Record) -> str | None:
    """The reason of a permanent failure; None if the run may be resumed."""
    reason = end["reason"]
    if end["code"] == DIVERGED:
        return f"diverged at step {end['step']}: {reason.partition(': ')[2] or reason}"
    if reason.startswith(_OUT_OF_MEMORY):
        return f"out of memory: {reason.partition(': ')[2]}"
    return None


def _end_loss(run: Path, steps: int, metric: str) -> float | None:
    """The metric of the validation after the last step; None without one. Raises DataError."""
    try:
        records, _ = read_records(run / "metrics.jsonl", ["eval"])
    except DataError as error:
        raise DataError(f"{error} Or delete the directory of this run to have it made again.") from None
    return next((compared(record, metric) for record in records["eval"] if record["step"] == steps), None)


def differences(stored: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """The keys that make runs with these two resolved configs different: names, stored and new values. Left out are
    name, place, and keys without an effect on the run and its validation: layout, checkpoints, logging."""
    old_values, new_values = (dict(flatten(redact(to_dict(config)), TABLES)) for config in (stored, new))
    found = {name: (old, value) for name, old, value in what_differs(stored, new)}
    found |= {name: (old_values[name], new_values[name]) for name in _COUNT_TOO if old_values[name] != new_values[name]}
    return [(name, *values) for name, values in found.items()]


def _is_clearly_another(stored: Config, new: Config) -> bool:
    """True if the runs differ in the usual keys. `differences` says the same, in milliseconds for each pair of runs."""
    if (stored.train.steps, stored.optim.lr) != (new.train.steps, new.optim.lr):
        return True
    model = replace(new.model, vocab_size=stored.model.vocab_size, init_table=stored.model.init_table)
    return stored.model != model


@lru_cache(maxsize=4096)
def _stored(path: Path, modified: int) -> Config | None:
    with suppress(DataError):
        return read_yaml(path)
    return None
