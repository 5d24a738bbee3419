"""A small study for tests, with an engine that writes the files of runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ngpt_train.config import load_config
from ngpt_train.config.arguments import arguments_of
from ngpt_train.config.stored import write_yaml
from ngpt_train.study.definition import Study, read_study
from ngpt_train.study.engines import Ended, Job
from ngpt_train.study.points import Point, Result, Runs

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


def leave(runs: Runs, point: Point, end: Mapping[str, Any] | None, loss: float = 3.0, config: Any = None) -> None:
    """Writes config.yaml of a point's run; with `end` also exit.json and the last validation."""
    run, steps = runs.directory(point), runs.steps_of(point)
    run.mkdir(parents=True, exist_ok=True)
    config = config or runs.config(point)
    if config.tokenizer.kind == "bytes":  # the run has found out
        config = replace(config, model=replace(config.model, vocab_size=257))
    write_yaml(config, run / "config.yaml")
    if end is not None:
        (run / "exit.json").write_text(json.dumps({"code": 0, "reason": "done", "step": steps} | dict(end)))
        record = {"kind": "eval", "step": steps, "tokens": point.budget, "loss": loss, "bits_per_byte": loss / 3}
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")


# How a job ends, by its attempt: the exit code and the last line of its output.
Outcome = Callable[[Any, Point, int], tuple[int | None, str]]


@dataclass
class FakeEngine:
    """Ends a job at the next look, as `outcome` says of its attempt."""

    runs: Runs | None
    outcome: Outcome
    jobs: int = 2
    threads: int = 1
    started: list[Point] = field(default_factory=list)
    stopped: bool = False
    _running: list[Job] = field(default_factory=list)

    def room(self) -> int:
        return 0 if self.stopped else self.jobs - len(self._running)

    def start(self, job: Job) -> None:
        assert self.room() > 0
        assert job.point not in [other.point for other in self._running]
        self.started.append(job.point)
        self._running.append(job)

    def running(self) -> Sequence[Job]:
        return list(self._running)

    def ended(self, seconds: float) -> list[Ended]:
        over, self._running = self._running[:1], self._running[1:]
        return [Ended(x, *self.outcome(self.runs, x.point, self.started.count(x.point))) for x in over]

    def stop(self) -> None:
        self.stopped = True


class Heard(list[str]):
    """In the place of the lines of progress."""

    say = list.append

    def update(self, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point]) -> None:
        assert not set(results) & {*running, *waiting}


def good(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
    """Every run ends well, with a loss that depends on its point."""
    leave(runs, point, {}, 3 + 0.1 * (point.arm == "gpt") - point.budget / 1e6 + 0.01 * point.seed)
    return 0, ""
