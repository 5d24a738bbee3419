"""A small study for tests, with an engine that writes the files of runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ngpt_train.config import load_config, write_yaml
from ngpt_train.config.arguments import arguments_of
from ngpt_train.study.composition import Runs
from ngpt_train.study.definition import Study, read_study
from ngpt_train.study.engines import Ended, Job
from ngpt_train.study.points import Point, Result
from ngpt_train.study.runner import Runner

YAML = """\
arms:
  gpt: {model: gpt}
  ngpt: {model: ngpt}
shared: {scale: debug, tokenizer: bytes, logging.wandb.mode: disabled}
budgets: [25600, 5120]
seeds: [0, 1]
"""


def options(directory: Path, text: str = YAML) -> list[str]:
    (directory / "study").mkdir(exist_ok=True)
    (directory / "study" / "small.yaml").write_text(text)
    return ["--config-dir", str(directory)]


def study_of(directory: Path, *arguments: str, text: str = YAML) -> Study:
    given = ["study=small", f"study.root={directory / 'studies'}", *arguments]
    config = load_config(arguments_of("study", given), str(directory) if options(directory, text) else None)
    return read_study(config.study, given, options(directory, text))


def leave(job: Job, runs: Runs, end: Mapping[str, Any] | None, loss: float = 3.0, config: Any = None) -> None:
    """Writes config.yaml of a job's run; with `end` also exit.json and the last validation."""
    steps = runs.steps(job.point.arm, job.point.budget)
    job.run.mkdir(parents=True, exist_ok=True)
    config = config or runs.config(job.point)
    if config.tokenizer.kind == "bytes":  # the run has found out
        config = replace(config, model=replace(config.model, vocab_size=257))
    write_yaml(config, job.run / "config.yaml")
    if end is not None:
        (job.run / "exit.json").write_text(json.dumps({"code": 0, "reason": "done", "step": steps} | dict(end)))
        record = {"kind": "eval", "step": steps, "loss": loss, "bits_per_byte": loss / 3}
        (job.run / "metrics.jsonl").write_text(json.dumps(record) + "\n")


@dataclass
class FakeEngine:
    """Ends a job at the next look, as `outcome` says of its attempt."""

    runs: Runs
    outcome: Callable[[Job, int], Ended]
    jobs: int = 2
    started: list[Job] = field(default_factory=list)
    stopped: bool = False
    _running: list[Job] = field(default_factory=list)

    def room(self) -> int:
        return 0 if self.stopped else self.jobs - len(self._running)

    def start(self, job: Job) -> None:
        assert self.room() > 0
        assert job.point not in [other.point for other in self._running]
        self.started.append(job)
        self._running.append(job)

    def running(self) -> Sequence[Job]:
        return list(self._running)

    def ended(self, seconds: float) -> list[Ended]:
        over, self._running = self._running[:1], self._running[1:]
        return [self.outcome(job, [other.point for other in self.started].count(job.point)) for job in over]

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Heard:
    lines: list[str] = field(default_factory=list)

    def update(self, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point]) -> None:
        assert not set(results) & {*running, *waiting}

    def say(self, line: str) -> None:
        self.lines.append(line)


def fixed_points(study: Study, starts: Callable[[str, int], float], results: Mapping[Point, Result]) -> list[Point]:
    """One learning rate for each arm, budget and seed, without tuning."""
    points = [
        Point(arm, budget, (("optim.lr", starts(arm, budget)),), seed)
        for arm in study.arms
        for budget in study.budgets
        for seed in study.seeds
    ]
    return [point for point in points if point not in results]


def runner_of(study: Study, outcome: Callable[[Job, int], Ended], retries: int = 2, **more: Any) -> Runner:
    runs = Runs(study)
    return Runner(
        study, runs, FakeEngine(runs, outcome), Heard(), more.pop("next_points", fixed_points), retries, **more
    )


def good(runs: Runs) -> Callable[[Job, int], Ended]:
    """Every run ends well, with a loss that depends on its point."""

    def outcome(job: Job, attempt: int) -> Ended:
        point = job.point
        leave(job, runs, {}, 3 + 0.1 * (point.arm == "gpt") - point.budget / 1e6 + 0.01 * point.seed)
        return Ended(job, 0, "")

    return outcome
