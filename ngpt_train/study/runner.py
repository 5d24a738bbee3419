"""Makes the runs of a study: asks the tuning for wanted points and gives them to an engine, until none is wanted."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from ngpt_train.config.stored import read_yaml
from ngpt_train.config.validate import show
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import DirectoryLock, write_json
from ngpt_train.study import sharing
from ngpt_train.study.composition import Runs
from ngpt_train.study.definition import Study
from ngpt_train.study.engines import Ended, Engine, Job
from ngpt_train.study.points import FAILURES, NextPoints, Point, Result, failure_record, result_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
REFUSED = 2  # exit code: wrong configuration
UNREADABLE = 3  # exit code: unreadable data, tokenizer or checkpoint


class Watcher(Protocol):
    """Shows the progress of a study."""

    def update(self, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point]) -> None: ...

    def say(self, line: str) -> None: ...


@dataclass
class Runner:
    """One start of a study, in a process that holds the lock of its directory."""

    study: Study
    runs: Runs
    engine: Engine
    watcher: Watcher
    next_points: NextPoints
    retries: int
    is_stopping: Callable[[], bool] = lambda: False
    results: dict[Point, Result] = field(default_factory=dict)  # final ones
    _attempts: Counter[Point] = field(default_factory=Counter)
    _checked: set[Point] = field(default_factory=set)
    _awaited: set[Point] = field(default_factory=set)  # in use by other processes
    _points: list[Point] = field(default_factory=list)  # the points wanted after `_known` results
    _known: int = -1

    def complete(self) -> bool:
        """Makes all wanted runs; False if it was stopped before the end.

        Raises ConfigError if a run was refused or has another configuration, and DataError if a new run cannot read its
        data. The other runs save first.
        """
        for record in sorted((self.study.path / FAILURES).glob("*.json")):
            record.unlink()  # crashed runs are tried again
        for point in self._made():  # also points that a grown study does not ask for any more
            result = result_of(point, self.runs.directory(point), self._steps(point), self.study.metric)
            if result.is_final:
                self.results[point] = result
        try:
            return self._loop()
        except BaseException:
            self._end_all()
            raise

    def _made(self) -> list[Point]:
        """The points with a run in the study's directory. Raises DataError for a damaged config.yaml."""
        points = []
        for path in sorted(self.study.runs.glob("*/config.yaml")):
            name = path.parent.name
            for arm, budget in product(self.study.arms, self.study.budgets):
                if not name.startswith(f"{arm}-{budget}-"):
                    continue
                stored = read_yaml(path)
                values = tuple(sorted((key, attrgetter(key)(stored)) for key in self.study.tune))
                point = Point(arm, budget, values, stored.run.seed)
                if point.directory == name and not sharing.differences(stored, self.runs.config(point)):
                    points.append(point)
        return points

    def _loop(self) -> bool:
        while True:
            wanted = self._wanted()
            stopping = self.is_stopping()
            if stopping:
                self.engine.stop()
            else:
                self._start(wanted)
            held = {job.point for job in self.engine.running()}
            self.watcher.update(
                self.results, sorted(held, key=wanted_order(wanted)), [p for p in wanted if p not in held]
            )
            if not held and (stopping or not wanted):
                return not wanted
            ended = self.engine.ended(LOOK_SECONDS)
            for one in ended:
                self._judge(one)
            if not held and not ended:  # other processes train all wanted runs
                time.sleep(LOOK_SECONDS)

    def _wanted(self) -> list[Point]:
        """The wanted points without a result, running or not. Short runs come first, so arms can be compared early.
        Each new result may change the wanted points."""
        self._look([point for point in self._points if point in self._awaited])
        while self._known != len(self.results):
            self._known = len(self.results)
            points = self.next_points(self.study, self.runs.start, self.results)
            self._points = sorted(points, key=lambda point: point.budget)
            held = {job.point for job in self.engine.running()}
            self._look([point for point in self._points if point not in held])
        return [point for point in self._points if point not in self.results]

    def _look(self, points: Sequence[Point]) -> None:
        """Takes over the results of ended runs, also of runs shared with other studies."""
        for point in points:
            run = self.runs.directory(point)
            self._share(point, run)
            check_whole(run)
            if point not in self._checked and (run / "config.yaml").exists():
                self._check(point, run)
                self._checked.add(point)
            result = result_of(point, run, self._steps(point), self.study.metric)
            if result.is_final:
                self.results[point] = result

    def _share(self, point: Point, run: Path) -> bool:
        """Makes the run a link to an equal run of another study, unless this study has begun it. True if it did."""
        if run.is_symlink() and not run.exists():
            run.unlink()  # the other study is gone
        if (run / "config.yaml").exists() or self._attempts[point]:
            return False
        other = sharing.find_run(self.study, point, self.runs.config(point), self._steps(point))
        if other is None or not sharing.link(run, other.run):
            return False
        self.watcher.say(f"{point.directory}: shares the run {other.run}")
        return True

    def _check(self, point: Point, run: Path) -> None:
        found = sharing.differences(read_yaml(run / "config.yaml"), self.runs.config(point))
        if found:
            lines = [f"{name}: {show(old)} -> {show(new)}" for name, old, new in found]
            fix = "Choose another study.name, or delete this directory to have the run made again."
            problem = f"study.name={self.study.name}: {run} is another run than the study's; stored -> asked for:"
            raise ConfigError("\n  ".join([problem, *(f"  {line}" for line in lines), fix]))

    def _start(self, wanted: Sequence[Point]) -> None:
        held = {job.point for job in self.engine.running()}
        for point in wanted:
            if self.engine.room() < 1:
                return
            run = self.runs.directory(point)
            if point in held:
                continue
            if self._share(point, run):  # another study has begun it since the last look
                self._awaited.add(point)
            elif (lock := DirectoryLock(run)).is_taken():
                if point not in self._awaited:
                    self.watcher.say(f"{point.directory}: {lock.holder()} is training it; waiting for it")
                self._awaited.add(point)
            else:
                self._awaited.discard(point)
                job = Job(point, run, (*self.runs.arguments(point), *self.study.options))
                self.engine.start(job)

    def _judge(self, ended: Ended) -> None:
        """After the end of a job: takes its result, starts it again, or records a failure."""
        point, run = ended.job.point, ended.job.run
        result = result_of(point, run, self._steps(point), self.study.metric)
        if result.is_final:
            self.results[point] = result
            said = f"{self.study.metric} {result.loss:.4f}" if result.loss is not None else f"failed: {result.reason}"
            self.watcher.say(f"{point.directory}: {said}")
            return
        if self.is_stopping():
            return
        check_whole(run)
        how = ended.how or f"ended with code {ended.code}"
        if ended.code == REFUSED and DirectoryLock(run).is_taken():  # another study resumed it first
            self._awaited.add(point)
            return
        if ended.code == REFUSED:
            raise ConfigError(f"run {point.directory} was refused: {how.removeprefix('error: ')}")
        if ended.code == UNREADABLE and not (run / "config.yaml").exists():  # the other runs would not find it either
            raise DataError(f"run {point.directory} cannot begin: {how.removeprefix('error: ')}")
        self._attempts[point] += 1
        if self._attempts[point] <= self.retries:
            self.watcher.say(f"{point.directory}: {how}; it is started again")
            return
        reason = f"{how} ({self._attempts[point]} attempts)"
        self.watcher.say(f"{point.directory}: failed: {reason}")  # first: a full disk has no room for the record
        record = failure_record(run)
        record.parent.mkdir(exist_ok=True)
        facts = {"arm": point.arm, "budget": point.budget, "seed": point.seed, "values": dict(point.values)}
        write_json(record, facts | {"reason": reason, "code": ended.code, "attempts": self._attempts[point]})
        self.results[point] = result_of(point, run, self._steps(point), self.study.metric)

    def _steps(self, point: Point) -> int:
        return self.runs.steps(point.arm, point.budget)

    def _end_all(self) -> None:
        self.engine.stop()
        while self.engine.running():
            self.engine.ended(LOOK_SECONDS)


def check_whole(run: Path) -> None:
    """Raises DataError if a run directory was deleted during its training, which then wrote into it again."""
    if not (run / "config.yaml").exists() and any((run / name).exists() for name in ("checkpoints", "exit.json")):
        raise DataError(
            f"{run} has lost its config.yaml, as if it had been deleted while the run trained. Delete this directory, "
            "and the same command makes the run again."
        )


def wanted_order(wanted: Sequence[Point]) -> Callable[[Point], int]:
    """The place of a point among the wanted ones."""
    places = {point: place for place, point in enumerate(wanted)}
    return lambda point: places.get(point, len(places))
