"""`study`: trains the arms of a comparison, each tuned, at several budgets and seeds, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.config.validate import did_you_mean, mistake, nearest
from ngpt_train.core.errors import ConfigError
from ngpt_train.core.files import DirectoryLock
from ngpt_train.study.compare.comparison import check_out
from ngpt_train.study.composition import Runs, check_text
from ngpt_train.study.cost import costs, measure, table
from ngpt_train.study.definition import Study, read_study
from ngpt_train.study.definition_file import check_stored, write_study
from ngpt_train.study.engines import Engine
from ngpt_train.study.engines.local import local_engine, usable_cores, usable_gpus
from ngpt_train.study.engines.slurm import slurm_engine
from ngpt_train.study.points import FAILED, Point, Result, failure_record
from ngpt_train.study.progress_lines import ProgressLines
from ngpt_train.study.runner import Runner
from ngpt_train.study.tuning import next_points


def main(config: Config, overrides: Sequence[str], options: Sequence[str] = ()) -> int:
    """Returns 0 when all runs are made and compared, or the study was interrupted and its runs have saved; 1 where runs
    have crashed too often. Raises what `make` raises."""
    return make("study", config, overrides, options, compared)


def make(
    verb: str,
    config: Config,
    overrides: Sequence[str],
    options: Sequence[str],
    then: Callable[[Config, Study, Mapping[Point, Result]], int],
) -> int:
    """Makes the runs of the study, and returns what `then` returns of them while nobody else can write to the study; 0
    for a dry run, and where it was interrupted. verb: the one that the user called. options: those that its runs are
    started with, such as --config-dir DIR.

    Raises ConfigError before anything is written where the definition is wrong or in use, and DataError.
    """
    study = read_study(config.study, overrides, options, verb)
    runs = Runs(study)
    runs.check()
    check_stored(study, runs)
    check_comparison(config, study)
    configs = {arm: runs.config(runs.first_point(arm, study.budgets[0])) for arm in study.arms}
    is_here = config.study.engine == "local"
    for one in configs.values() if is_here else ():
        check_text(one)
    lock = None if config.study.dry_run else taken(study)
    try:
        on_cpu = all(one.train.device == "cpu" for one in configs.values())
        engine = engine_of(config, study, on_cpu)
        sizes = measure(configs, engine.threads, is_here)
        expected = costs(study, runs, next_points, sizes)
        print(table(study, expected, sizes, engine.jobs), flush=True)
        if lock is None:
            return 0
        write_study(study)
        from ngpt_train.training.hooks.stopping import StopRequest  # brings torch, which a mistake need not wait for

        stop = StopRequest(max_hours=None)
        with stop, ProgressLines(study, expected, engine.jobs) as progress:
            runner = Runner(
                study, runs, engine, progress, next_points, config.study.retries, lambda: stop.reason is not None
            )
            complete = runner.complete()
        if not complete:
            others = "have saved" if is_here else "stay in the queue"
            print(
                f"interrupted: {len(runner.results)} runs have ended, the others {others}; the same command goes on",
                flush=True,
            )
            return 0
        return then(config, study, runner.results)
    finally:
        if lock is not None:
            lock.release()


def engine_of(config: Config, study: Study, on_cpu: bool) -> Engine:
    """The engine that makes the runs. on_cpu: no arm has a GPU. Raises ConfigError where a cluster cannot be used from
    here."""
    if config.study.engine == "slurm":
        return slurm_engine(config.study, study.path, is_used=not config.study.dry_run)
    return local_engine(config.study, [] if on_cpu else usable_gpus(), usable_cores(), study.runs)


def check_comparison(config: Config, study: Study) -> None:
    """Raises ConfigError for what the comparison at the study's end, hours later, would refuse."""
    compare = config.compare
    if compare.out is not None:
        check_out(Path(compare.out).expanduser())
    if compare.baseline is None or compare.arms is not None:
        return
    if compare.baseline not in study.arms and not (study.runs / Path(compare.baseline).name).exists():
        near = did_you_mean(nearest(compare.baseline, study.arms))
        raise mistake(
            f"compare.baseline={compare.baseline}: no arm of that name{near}", f"Arms: {', '.join(study.arms)}"
        )


def taken(study: Study) -> DirectoryLock:
    """The lock of the study's directory, which this process has now. Raises ConfigError where another has it."""
    lock = DirectoryLock(study.path)
    try:
        study.path.mkdir(parents=True, exist_ok=True)
        lock.create()
        lock.take()
    except BlockingIOError:
        raise ConfigError(
            f"study.name={study.name}: {lock.holder()} is running the study in {study.path}. Wait for it, stop it, or "
            "choose another study.name."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"study.root={study.root}: {study.path} cannot be written or locked ({error.strerror}). Choose another "
            "study.root."
        ) from None
    return lock


def ended(study: Study, results: Mapping[Point, Result]) -> tuple[list[Result], int]:
    """Says which runs have failed; these, and the exit code: 1 where one has crashed too often."""
    failed = [result for result in results.values() if result.state == FAILED]
    for result in failed:
        print(f"failed: {result.point.directory}: {result.reason}")
    print(f"{len(results) - len(failed)} of {len(results)} runs in {study.runs} have ended well", flush=True)
    return failed, 1 if any(failure_record(result.run).exists() for result in failed) else 0


def compared(config: Config, study: Study, results: Mapping[Point, Result]) -> int:
    """Says which runs have failed, and compares the others; the exit code. Raises what `compare` raises."""
    failed, code = ended(study, results)
    if len(study.arms) > 1 and len(failed) < len(results):
        from ngpt_train.verbs import compare

        out = config.compare.out or str(study.path / "report")
        is_here = config.study.engine == "local"  # elsewhere this may be no such machine
        compare.main(replace(config, compare=replace(config.compare, runs=[str(study.path)], out=out)), [], is_here)
        print(f"the page: {Path(out) / 'report.html'}, the curves: {Path(out) / 'figures/loss_over_tokens.png'}")
    if config.study.prompt is not None:
        show_samples(config, study, results.values())
    if missing := what_is_missing(study):
        print(f"\n{missing}")
    return code


def show_samples(config: Config, study: Study, results: Iterable[Result]) -> None:
    """Prints how the run with the lowest loss of each arm continues study.prompt."""
    from ngpt_train.verbs import generate

    for arm in study.arms:
        runs = {result.run: result.loss for result in results if result.point.arm == arm and result.loss is not None}
        if not runs:
            continue
        best = min(runs, key=runs.__getitem__)
        print(f"\n--- {arm}, a sample of {best}", flush=True)
        of_run = replace(config.generate, checkpoint=str(best), prompt=config.study.prompt or "")
        generate.main(replace(config, generate=of_run), [])


def what_is_missing(study: Study) -> str | None:
    """In words, why this study proves nothing, and which command does; None where it has several seeds and budgets."""
    few = [f"one {word}" for word, values in (("seed", study.seeds), ("budget", study.budgets)) if len(values) == 1]
    if not few:
        return None
    return (
        f"{' and '.join(few).capitalize()}: this proves nothing, for another may turn it round. What does, with tuned "
        "rates, several budgets and seeds, and intervals: python -m ngpt_train study study=gpt_vs_ngpt"
    )
