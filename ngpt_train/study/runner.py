"""Makes the runs of a study: asks the tuning for wanted points and gives them to an engine, until none is wanted."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.config.stored import read_yaml
from ngpt_train.config.validate import show
from ngpt_train.core.cpus import whole_cpus
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import DirectoryLock, write_json
from ngpt_train.study.begun_study import check_stored, mismatch
from ngpt_train.study.compare.comparison import check_out
from ngpt_train.study.cost import cost_of_phases, costs, measure, rehearsal, table
from ngpt_train.study.definition import LR, Study, check_arm, hashable, read_study, write_study
from ngpt_train.study.descent import write_phases
from ngpt_train.study.engines import Ended, Engine, Job
from ngpt_train.study.engines.local import local_engine, usable_gpus
from ngpt_train.study.engines.slurm import slurm_engine
from ngpt_train.study.points import FAILED, FAILURES, Point, Result, Results, Runs, differences, failure_record
from ngpt_train.study.progress_lines import ProgressLines
from ngpt_train.study.search import ends, next_points, phases
from ngpt_train.study.tuning import sorted_values

LOOK_SECONDS = 0.5
Then = Callable[[Config, Study, Results], int]  # what follows once the runs are made; returns the exit code


def make(verb: str, config: Config, overrides: Sequence[str], options: Sequence[str], then: Then) -> int:
    """Makes the runs of the study, and returns what `then` returns of them while nobody else can write to the study; 0
    for a dry run, and where it was interrupted. verb: `study` or `transfer`. options: of its runs too, such as
    --config-dir DIR.

    Raises ConfigError before anything is written where the definition is wrong or in use, and DataError.
    """
    study = read_study(config.study, overrides, options, verb)
    runs = Runs(study)
    runs.check()
    check_stored(study, runs)
    _check_comparison(config, study)
    configs = {arm: runs.config(runs.first_point(arm, study.budgets[0])) for arm in study.arms}
    is_here = config.study.engine == "local"
    for one in configs.values() if is_here else ():
        if one.data.kind == "local" and one.data.path is not None:
            from ngpt_train.data.sources.local_files import text_files  # slow to import: mistakes are reported at once

            text_files(one.data)  # raises DataError for files that are not on this machine
    lock = None if config.study.dry_run else _taken(study)
    try:
        engine: Engine
        if is_here:
            on_cpu = all(one.train.device == "cpu" for one in configs.values())
            engine = local_engine(config.study, [] if on_cpu else usable_gpus(), whole_cpus(), study.runs)
        else:
            engine = slurm_engine(config.study, study.path, is_used=not config.study.dry_run)
        sizes = measure(configs, engine.threads, is_here)
        near = rehearsal(study, runs)
        expected = costs(study, runs, sizes, near)
        said = (table(study, expected, sizes, engine.jobs), cost_of_phases(study, runs, near))
        print("\n\n".join(filter(None, said)), flush=True)
        if lock is None:
            return 0
        write_study(study)
        from ngpt_train.training.hooks.stopping import StopRequest

        stop = StopRequest(max_hours=None)
        so_far = partial(ends, study, runs.start, runs.grids)
        with stop, ProgressLines(study, expected, engine.jobs, so_far) as progress:
            runner = Runner(study, runs, engine, progress, config.study.retries, lambda: stop.reason is not None)
            complete = runner.complete()
        if not complete:
            others = "have saved" if is_here else "stay in the queue"
            state = f"{len(runner.results)} runs have ended, the others {others}"
            print(f"interrupted: {state}; the same command goes on", flush=True)
            return 0
        return then(config, study, runner.results)
    finally:
        if lock is not None:
            lock.release()


def ended(study: Study, results: Results) -> tuple[list[Result], int]:
    """Says which runs have failed; these, and the exit code: 1 where one has crashed too often."""
    failed = [result for result in results.values() if result.state == FAILED]
    for result in failed:
        print(f"failed: {result.point.directory}: {result.reason}")
    print(f"{len(results) - len(failed)} of {len(results)} runs in {study.runs} have ended well", flush=True)
    return failed, 1 if any(failure_record(result.run).exists() for result in failed) else 0


def _check_comparison(config: Config, study: Study) -> None:
    """Raises ConfigError for what the comparison at the study's end, hours later, would refuse."""
    out, baseline = config.compare.out, config.compare.baseline
    if out is not None:
        check_out(Path(out).expanduser())
    if baseline is not None and config.compare.arms is None and not (study.runs / Path(baseline).name).exists():
        check_arm(f"compare.baseline={baseline}", baseline, study.arms)


def _taken(study: Study) -> DirectoryLock:
    """The lock of the study's directory, which this process has now. Raises ConfigError where another has it."""
    lock = DirectoryLock(study.path)
    try:
        study.path.mkdir(parents=True, exist_ok=True)
        lock.create()
        lock.take()
    except BlockingIOError:
        problem = f"study.name={study.name}: {lock.holder()} is running the study in {study.path}"
        raise ConfigError(f"{problem}. Wait for it, stop it, or choose another study.name.") from None
    except OSError as error:
        problem = f"study.root={study.root}: {study.path} cannot be written or locked ({error.strerror})"
        raise ConfigError(f"{problem}. Choose another study.root.") from None
    return lock


@dataclass
class Runner:
    """One start of a study, in a process that holds the lock of its directory."""

    study: Study
    runs: Runs
    engine: Engine
    progress: ProgressLines
    retries: int
    is_stopping: Callable[[], bool] = lambda: False
    results: dict[Point, Result] = field(default_factory=dict)  # final ones
    _attempts: Counter[Point] = field(default_factory=Counter)
    _checked: set[Point] = field(default_factory=set)
    _awaited: set[Point] = field(default_factory=set)  # in use by other processes
    _points: list[Point] = field(default_factory=list)  # the points wanted after `_known` results
    _known: int = -1

    def complete(self) -> bool:
        """Makes all wanted runs; False if it was stopped before the end. Raises ConfigError if a run was refused or has
        another configuration, and DataError if a new run cannot read its data. The other runs save first."""
        for record in sorted((self.study.path / FAILURES).glob("*.json")):
            record.unlink()  # crashed runs are tried again
        for point in self._made():  # also points that a grown study does not ask for any more
            self._take_over(point)
        try:
            return self._loop()
        except BaseException:
            self.engine.stop()
            while self.engine.running():
                self.engine.ended(LOOK_SECONDS)
            raise

    def _made(self) -> Iterator[Point]:
        """The points with a run in the study's directory. Raises DataError for a damaged config.yaml."""
        for path in sorted(self.study.runs.glob("*/config.yaml")):
            for arm, budget in product(self.study.arms, self.study.budgets):
                if path.parent.name.startswith(f"{arm}-{budget}-"):
                    stored, keys = read_yaml(path), (LR, *self.study.keys_of(arm))
                    values = sorted_values({key: hashable(attrgetter(key)(stored)) for key in keys})
                    point = Point(arm, budget, values, stored.run.seed)
                    if point.directory == path.parent.name and not differences(stored, self.runs.config(point)):
                        yield point

    def _loop(self) -> bool:
        while True:
            wanted, stopping = self._wanted(), self.is_stopping()
            if stopping:
                self.engine.stop()
            else:
                self._start(wanted)
            held = self._held()
            running = sorted(held, key=lambda point: wanted.index(point) if point in wanted else len(wanted))
            self.progress.update(self.results, running, [point for point in wanted if point not in held])
            if not held and (stopping or not wanted):
                return not wanted
            ended = self.engine.ended(LOOK_SECONDS)
            for one in ended:
                self._judge(one)
            if not held and not ended:  # other processes train all wanted runs
                time.sleep(LOOK_SECONDS)

    def _wanted(self) -> list[Point]:
        """The wanted points without a result, running or not; short runs first, so arms can be compared early."""
        self._look([point for point in self._points if point in self._awaited])
        while self._known != len(self.results):
            self._known = len(self.results)
            search = self.study, self.runs.start, self.runs.grids, self.results
            if found := phases(*search):  # at each result, since `compare` relies on it also after a kill
                write_phases(self.study.path, found)
            points = next_points(*search)
            self._points = sorted(points, key=lambda point: point.budget)
            held = self._held()
            self._look([point for point in self._points if point not in held])
        return [point for point in self._points if point not in self.results]

    def _held(self) -> set[Point]:
        return {job.point for job in self.engine.running()}

    def _look(self, points: Sequence[Point]) -> None:
        """Takes over the results of ended runs, also of runs shared with other studies."""
        for point in points:
            run = self.runs.directory(point)
            self._share(point, run)
            _check_whole(run)
            if point not in self._checked and (run / "config.yaml").exists():
                if found := differences(read_yaml(run / "config.yaml"), self.runs.config(point)):
                    lines = [f"{name}: {show(old)} -> {show(new)}" for name, old, new in found]
                    fix = "Choose another study.name, or delete this directory to have the run made again."
                    raise mismatch(f"study.name={self.study.name}: {run} is another run than the study's", lines, fix)
                self._checked.add(point)
            self._take_over(point)

    def _take_over(self, point: Point) -> Result:
        result = self.runs.result(point)
        if result.is_final:
            self.results[point] = result
        return result

    def _share(self, point: Point, run: Path) -> bool:
        """Makes the run a link to an equal run of another study, unless this study has begun it. True if it did."""
        if run.is_symlink() and not run.exists():
            run.unlink()  # the other study is gone
        if (run / "config.yaml").exists() or self._attempts[point]:
            return False
        if (other := self.runs.equal_run(point)) is None:
            return False
        run.parent.mkdir(parents=True, exist_ok=True)
        try:
            run.symlink_to(os.path.relpath(other.resolve(), run.parent.resolve()))
        except FileExistsError:
            return False
        self.progress.say(f"{point.directory}: shares the run {other}")
        return True

    def _start(self, wanted: Sequence[Point]) -> None:
        held = self._held()
        for point in [point for point in wanted if point not in held]:
            if self.engine.room() < 1:
                return
            run = self.runs.directory(point)
            if self._share(point, run):  # another study has begun it since the last look
                self._awaited.add(point)
            elif (lock := DirectoryLock(run)).is_taken():
                if point not in self._awaited:
                    self.progress.say(f"{point.directory}: {lock.holder()} is training it; waiting for it")
                self._awaited.add(point)
            else:
                self._awaited.discard(point)
                self.engine.start(Job(point, run, (*self.runs.arguments(point), *self.study.options)))

    def _judge(self, ended: Ended) -> None:
        """After the end of a job: takes its result, starts it again, or records a failure."""
        point, run = ended.job.point, ended.job.run
        result = self._take_over(point)
        if result.is_final:
            said = f"{self.study.metric} {result.loss:.4f}" if result.loss is not None else f"failed: {result.reason}"
            self.progress.say(f"{point.directory}: {said}")
            return
        if self.is_stopping():
            return
        _check_whole(run)
        how = ended.how or f"ended with code {ended.code}"
        if ended.code == ConfigError.exit_code and DirectoryLock(run).is_taken():  # another study resumed it first
            self._awaited.add(point)
            return
        if ended.code == ConfigError.exit_code:
            raise ConfigError(f"run {point.directory} was refused: {how.removeprefix('error: ')}")
        if ended.code == DataError.exit_code and not (run / "config.yaml").exists():
            # The other runs would not find it either.
            raise DataError(f"run {point.directory} cannot begin: {how.removeprefix('error: ')}")
        self._attempts[point] += 1
        if self._attempts[point] <= self.retries:
            self.progress.say(f"{point.directory}: {how}; it is started again")
            return
        reason = f"{how} ({self._attempts[point]} attempts)"
        self.progress.say(f"{point.directory}: failed: {reason}")  # first: a full disk has no room for the record
        record = failure_record(run)
        record.parent.mkdir(exist_ok=True)
        facts = {"arm": point.arm, "budget": point.budget, "seed": point.seed, "values": dict(point.values)}
        write_json(record, facts | {"reason": reason, "code": ended.code, "attempts": self._attempts[point]})
        self._take_over(point)


def _check_whole(run: Path) -> None:
    """Raises DataError if a run directory was deleted during its training, which then wrote into it again."""
    if not (run / "config.yaml").exists() and any((run / name).exists() for name in ("checkpoints", "exit.json")):
        problem = f"{run} has lost its config.yaml, as if it had been deleted while the run trained"
        raise DataError(f"{problem}. Delete this directory, and the same command makes the run again.")
