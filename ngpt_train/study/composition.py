"""The runs of a study for `train`: arguments and configurations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from ngpt_train.config.compose import load_config
from ngpt_train.config.schema import Config
from ngpt_train.config.validate import mistake, show
from ngpt_train.core.errors import ConfigError
from ngpt_train.study.definition import LR, SAME_BUDGET, Study, merged
from ngpt_train.study.points import Point

_MANY_STEPS = 1_000_000_000


def check_text(config: Config) -> None:
    """Raises DataError if the files of data=local are not on this machine."""
    from ngpt_train.data.sources.local_files import list_files  # slow to import, and mistakes are reported at once

    for name, path in (("data.path", config.data.path), ("data.val_files", config.data.val_files)):
        if config.data.kind == "local" and path is not None:
            list_files(path, name)


class Runs:
    """Arguments and configurations of a study's points. All methods raise ConfigError."""

    def __init__(self, study: Study) -> None:
        self.study = study
        # Composing takes some 50 ms, and each turn of the loop asks again.
        self.steps = cache(self._steps)
        self.config = cache(self._config)
        self.start = cache(self._start)

    def directory(self, point: Point) -> Path:
        return self.study.runs / point.directory

    def arguments(self, point: Point) -> tuple[str, ...]:
        """The arguments of `train`, each key once."""
        study = self.study
        words = ",".join(f"'{word}'" for word in (point.arm, f"budget {point.budget}", f"seed {point.seed}"))
        return merged(
            [f"logging.wandb.group={study.name}", f"logging.wandb.tags=[{words}]"],
            self._of_arm(point.arm),
            [f"train.steps={self.steps(point.arm, point.budget)}"],
            [f"{key}={show(value)}" for key, value in point.values],
            [f"run.seed={point.seed}", f"run.root={study.runs}", f"run.name={point.directory}"],
        )

    def first_point(self, arm: str, budget: int) -> Point:
        """The point with the recipe's learning rate, the first value of each further key, and the first seed."""
        further = {key: tuned.values[0] for key, tuned in self.study.tune.items() if key != LR}
        values = {LR: self.start(arm, budget), **further}
        return Point(arm, budget, tuple(sorted(values.items())), self.study.seeds[0])

    def check(self) -> None:
        """Composes the configuration of every arm at every budget, with each value of every further key."""
        for arm in self.study.arms:
            before = 0
            for budget in self.study.budgets:
                with _saying(f"arm {arm}, budget {budget}"):
                    steps = self.steps(arm, budget)
                    if steps <= before * (1 + SAME_BUDGET):
                        problem = f"study.budgets: {budget} tokens are {steps} steps, the budget before {before}"
                        raise mistake(problem, f"Budgets within {SAME_BUDGET:.0%} of each other are one: name it once")
                    before = steps
                    first = self.first_point(arm, budget)
                    self.config(first)
                    for key, value in [(key, v) for key, tuned in self.study.tune.items() for v in tuned.values[1:]]:
                        values = dict(first.values) | {key: value}
                        self.config(replace(first, values=tuple(sorted(values.items()))))

    def _config(self, point: Point) -> Config:
        return load_config(self.arguments(point), self.study.config_dir, world_size=1)

    def _start(self, arm: str, budget: int) -> float:
        """The learning rate of the arm's recipe at this budget."""
        arguments = [*self._of_arm(arm), f"train.steps={self.steps(arm, budget)}"]
        return float(load_config(arguments, self.study.config_dir, world_size=1).optim.lr)

    def _steps(self, arm: str, budget: int) -> int:
        """Steps of `budget` tokens, rounded to whole steps."""
        # No warmup is too long for this many steps. `config` checks it against the real number.
        arguments = [*self._of_arm(arm), f"train.steps={_MANY_STEPS}"]
        config = load_config(arguments, self.study.config_dir, world_size=1)
        tokens = config.train.rows_per_step * config.model.context
        steps = round(budget / tokens)
        if steps < 1:
            problem = f"study.budgets: {budget} tokens are less than a step of arm {arm}, which has {tokens}"
            raise mistake(problem, f"Set study.budgets to multiples of {tokens}, or a smaller train.batch_rows")
        return steps

    def _of_arm(self, arm: str) -> tuple[str, ...]:
        return merged(self.study.shared, self.study.arms[arm])


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Puts `what` before the message of a ConfigError inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
