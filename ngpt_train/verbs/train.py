"""`train`: trains in a run directory, from its start or its last checkpoint to the planned end or an interruption."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.config import read_yaml, write_yaml
from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import commits_of, with_commits
from ngpt_train.config.stored import with_first_values
from ngpt_train.core.errors import DataError, is_told_here, same_on_host
from ngpt_train.core.files import read_json, write_json
from ngpt_train.core.launcher import end_with_launcher
from ngpt_train.data import (
    Dataset,
    Position,
    Tokenizer,
    TrainLoader,
    epoch_rows,
    many_epochs,
    merged,
    open_dataset,
    read_tokenizer,
    reader_of,
    write_tokenizer,
)
from ngpt_train.distributed import PRECISIONS, World, join_world, resolve_device, resolve_precision
from ngpt_train.evaluation import Evaluations, RowFiles
from ngpt_train.evaluation.asked import sampling_of, tasks_of
from ngpt_train.evaluation.trust import note_names
from ngpt_train.observe import Sink, build_sinks
from ngpt_train.observe.meters import Meter
from ngpt_train.observe.telemetry import Telemetry
from ngpt_train.optim import round_to_bf16_
from ngpt_train.report.curves import plot_run
from ngpt_train.report.enough_memory import check_state_fits
from ngpt_train.training import TrainState, build_state, check_kernels
from ngpt_train.training.checkpoint import (
    Checkpoints,
    Saves,
    load_model,
    load_state,
    newest_undamaged,
    newest_with_config,
    step_of,
)
from ngpt_train.training.feed import Feed
from ngpt_train.training.guards import GoBack
from ngpt_train.training.loop import Parts, train
from ngpt_train.training.profile import profiled
from ngpt_train.training.provenance import describe_start, initial_checkpoint
from ngpt_train.training.run_directory import DONE, RunDirectory
from ngpt_train.training.signals import Patience, StopRequest
from ngpt_train.training.step import NOBODY, Observer
from ngpt_train.training.watchdog import Watchdog
from ngpt_train.verbs.of_train import rollback
from ngpt_train.verbs.of_train.notes import say_what_starts, unigram_note, where_it_goes_on

if TYPE_CHECKING:
    from ngpt_train.evaluation.tasks import Tasks

logger = logging.getLogger(__name__)


def main(config: Config, overrides: Sequence[str]) -> int:
    """Returns 0 when the run is done, or was interrupted and saved; a collective call.

    Raises ConfigError, DataError, NumericalError or DeviceMemoryError; each has its exit code.
    """
    end_with_launcher()
    stop = StopRequest(config.run.max_time)  # first of all: the time to prepare data counts
    run = RunDirectory(config)
    with same_on_host():
        checkpoint = run.check(config)  # only reads, so that a refusal comes before anything slow
        if checkpoint is None:
            initial_checkpoint(config)
        else:
            checkpoint = newest_with_config(run.candidates(config))
    resolve_device(config.train.device, int(os.environ.get("LOCAL_RANK", "0")))
    if checkpoint is not None:
        stored = read_yaml(checkpoint / "config.yaml")
        config = with_first_values(with_first_commits(config, stored), stored)
    world = join_world(config)
    with same_on_host():
        check_state_fits(config, world)
    if world.is_main:
        note_names(config)
    # Listing, downloading and tokenizing may take hours, longer than a collective waits.
    tokenizer = trained_tokenizer(config, checkpoint)
    data = world.on_all_without_timeout(lambda: open_dataset(config, tokenizer, world.on_main_without_timeout))
    config = with_vocabulary(config, data)
    config = with_precision(config, world)
    config = replace(config, data=with_commits(config.data, data.commits))
    if len(set(world.gather(data.fingerprint))) > 1:
        raise DataError(
            "data: the ranks have read different data (another Python, other files, another cache?). Prepare it once "
            "with `prepare` where all nodes see it, and use data=tokens data.path=DIRECTORY."
        )
    checkpoint = world.on_main(lambda: run.check(config, data))
    found = world.on_main(lambda: run.candidates(config)) if checkpoint else []
    checkpoint, damaged = newest_undamaged(found, world)
    last = config.train.stop_at or config.train.steps
    if checkpoint and step_of(checkpoint) >= last and run.done:
        if world.is_main:
            by = "" if last == config.train.steps else f", by train.stop_at, of {config.train.steps}"
            print(f"{run.path}: nothing to do, the run is at step {step_of(checkpoint)} and would end at {last}{by}.")
        return 0
    with stop:  # until everything is written, the curves too
        feed: Feed | None
        kernels = check_kernels(config, world, world.on_main(lambda: run.kernels() if checkpoint else None))
        state, feed = begin_or_resume(config, world, data, checkpoint, stop)
        validation = Evaluations(data.validation, data.tokenizer.n_bytes, config)
        asked = tasks_of(config.eval, config.model, world)
        start = world.on_main(lambda: describe_start(state, data)) | kernels
        # Without a timeout: run.overwrite deletes files, which may take long.
        start = world.on_main_without_timeout(lambda: run.open(config, start, checkpoint, damaged))
        telemetry = Telemetry(state) if config.logging.telemetry else NOBODY
        while feed is not None:
            feed = train_in(run, state, feed, validation, asked, data, start, stop, telemetry)
    return 0


def with_first_commits(config: Config, stored: Config) -> Config:
    """`config` with the commits of hub data sets that the run began with, except where `config` names a commit.

    stored: the config in the run's checkpoint.
    """
    data = with_commits(config.data, commits_of(stored.data))
    for name, commit in commits_of(data).items():
        if commit != (configured := commits_of(config.data)[name]):
            logger.info(
                "data.revision=%s%s: the run goes on with %s, as it began", configured, name and f" of {name}", commit
            )
    return replace(config, data=data)


def trained_tokenizer(config: Config, checkpoint: Path | None) -> Tokenizer | None:
    """The SentencePiece model, or the words, that the run made from its text, read from its checkpoint.

    None for a new run, and for a run whose tokenizer comes from elsewhere.
    """
    comes_with_tokens = config.data.kind == "tokens"
    if checkpoint is None or not config.tokenizer.from_text or comes_with_tokens:
        return None
    return read_tokenizer(checkpoint, read_json(checkpoint / "tokenizer.json"))


def with_vocabulary(config: Config, data: Dataset) -> Config:
    """`config` with the tokenizer's size where `model.vocab_size` is auto.

    Raises DataError where `model.vocab_size` is smaller than the tokenizer's.
    """
    needed = data.tokenizer.vocab_size
    if config.model.vocab_size == AUTO:
        return replace(config, model=replace(config.model, vocab_size=needed))
    if int(config.model.vocab_size) < needed:
        raise DataError(
            f"model.vocab_size={config.model.vocab_size}: the tokenizer {data.tokenizer.name} has {needed} ids. "
            f"Use model.vocab_size=auto, or at least {needed}."
        )
    return config


def with_precision(config: Config, world: World) -> Config:
    """`config` with `train.precision` resolved, so that a resume on another device cannot change it silently."""
    dtype = resolve_precision(config.train.precision, world.device.type)
    precision = next(name for name, of_name in PRECISIONS.items() if of_name == dtype)
    return replace(config, train=replace(config.train, precision=precision))


def begin_or_resume(
    config: Config, world: World, data: Dataset, checkpoint: Path | None, stop: StopRequest
) -> tuple[TrainState, Feed]:
    """The training state and the batches, at the checkpoint's step, or at step 0 where there is no checkpoint.

    At step 0 the weights are those of run.init_from, or initial ones.
    """
    state = build_state(config, world)
    position: dict[str, Any] | None = None
    if checkpoint:
        position = load_state(checkpoint, state, verified=True)
    elif initial := initial_checkpoint(config):
        load_model(initial, state.model, world)
        state.model.project_()
        if config.optim.storage == "bf16":
            round_to_bf16_(state.model)
    return state, open_feed(state, data, position, stop)


def open_feed(state: TrainState, data: Dataset, position: dict[str, Any] | None, stop: StopRequest) -> Feed:
    """The batches from `position` on, which a checkpoint holds; None is the beginning."""
    config, world = state.config, state.world
    # Without a timeout: the shards of the first rows may have to be downloaded.
    patience = Patience(stop, world, config.data.fetch_minutes)
    reader = world.on_all_without_timeout(lambda: reader_of(data, config, world.rank, world.size, position, patience))
    loader = TrainLoader(
        reader,
        batch_rows=config.train.rows_per_step,
        micro_rows=state.micro_rows,
        rank=world.rank,
        world_size=world.size,
        state=position,
    )
    return Feed(loader, state.model, world.device)


def train_in(
    run: RunDirectory,
    state: TrainState,
    feed: Feed,
    validation: Evaluations,
    asked: "Tasks | None",
    data: Dataset,
    start: dict[str, Any],
    stop: StopRequest,
    telemetry: Observer,
) -> Feed | None:
    """Trains, and whatever happens writes how it ended and closes feed, sinks and directory; a collective call.

    run: the directory, which rank 0 has opened. start: rank 0's entry in run.json. Returns None at the end, or, where
    guards.rollback has taken the state back, the feed to go on with; then the directory stays open. Raises what
    `loop.train` raises.
    """
    config, world = state.config, state.world
    last = config.train.stop_at or config.train.steps
    kept = config.checkpoint
    checkpoints = Checkpoints(run.checkpoints, world, kept.keep_last, kept.keep_every, kept.checksum, kept.keep_best)
    checkpoints.go_back_every = rollback.every(config) if config.guards.rollback else 1
    resumed = state.step or None
    sinks: list[Sink] = []

    def say(text: str) -> None:
        for sink in sinks:
            sink.message(text)

    def add_files(directory: Path) -> None:
        write_yaml(config, directory / "config.yaml")
        write_json(directory / "tokenizer.json", write_tokenizer(data.tokenizer, directory))

    saves = Saves(checkpoints, state, lambda checkpoint: run.saved(step_of(checkpoint)), say)

    def save(state: TrainState, position: Position, loss: float) -> None:
        saves.save(state, merged(world.gather(position)), add_files, loss)

    last_evaluation: dict[str, Any] = {}
    row_files: RowFiles | None = None

    def evaluate(state: TrainState) -> dict[str, Any]:
        losses = validation.row_losses(state.model, world, last=state.step >= last)
        if row_files is not None:
            try:
                row_files.write(state.step, losses)
            except DataError as error:
                say(f"warning: {error}")
        last_evaluation.update(validation.metrics(losses))
        if world.is_main:
            checkpoints.validated(state.step, last_evaluation["loss"])
        return dict(last_evaluation)

    watchdog = Watchdog(
        world, config.parallel.hang_seconds, lambda reason: run.finish(1, f"hung: {reason}", state.step, world.rank)
    )
    code, reason, told = 1, "failed", True
    stopped = "" if last == config.train.steps else f"stopped by train.stop_at={last}"
    again: Feed | None = None
    try:
        if world.is_main:
            sinks += build_sinks(config, run.path, start, resumed, state.rollbacks)
            row_files = RowFiles(run.path / "evals", run.path / "metrics.jsonl", config.model.context)
        say_what_starts(say, run, state, start, resumed)
        if (went_back := rollback.record_of(state)) is not None:
            for sink in sinks:
                sink.log(went_back)
        sizes = epoch_rows(data, config) if world.is_main else {}
        for note in [
            *validation.notes(),
            *(asked.notes() if asked else []),
            *(f"warning: {warning}" for warning in many_epochs(sizes, config)),
        ]:
            say(note)
        unigram = unigram_note(data, validation, config) if world.is_main else ""
        if unigram:
            say(f"validation loss: {unigram}")
        say(saves.described)
        with profiled(config.train.profile, run.path / "profile", world) as after_step:
            rows_of_an_epoch = {name: size.rows for name, size in sizes.items()}
            meter, lr = meter_of(state), float(config.optim.lr)
            parts = Parts(feed, evaluate, save, sinks, meter, after_step, rows_of_an_epoch, telemetry)
            parts.advice = lambda: checkpoints.advice(lr)
            parts.may_go_back = lambda why: rollback.may_go_back(run, state, why, checkpoints.advice(lr))
            parts.during = watchdog.during
            if asked is not None:
                parts.evaluate_tasks = lambda state: asked(state.model, data.tokenizer, world).metrics()
            parts.sample = sampling_of(config, data.tokenizer)
            parts.settle, parts.save_has_failed = saves.settle, saves.has_failed
            try:
                with watchdog.naming_the_lost():
                    interruption = train(state, parts, stop)
                    saves.settle()
            except GoBack as back:
                feed.close()
                again = open_feed(state, data, rollback.go_back(run, state, back), stop)
                reason = rollback.describe(state.rollbacks[-1])
                return again
        code, reason = 0, interruption or DONE
        if interruption:
            say(f"{interruption}: {where_it_goes_on(run, state.step)}")
        else:
            say("; ".join(filter(None, [f"validation loss {last_evaluation['loss']:.4f}", unigram])))
            if stopped:
                goes_on = where_it_goes_on(run, state.step, without="train.stop_at and run.overwrite")
                say(f"{stopped}, before the last of {config.train.steps} steps: {goes_on}")
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        reason = f"{type(error).__name__}: {error}"
        told = is_told_here(error)
        raise
    finally:
        if again is None and (world.is_main or (code and told)):
            # First: wandb may take so long to close that torchrun kills.
            run.finish(code, reason, state.step, world.rank)
        with watchdog.during("the checkpoint of step", state.step):
            saves.close()
        watchdog.close()
        feed.close()
        close(sinks, stopped if stopped and reason == DONE else reason)
        if again is None:
            run.release()
    if world.is_main:
        print(f"curves: {plot_run(run.path)}")
    return None


def meter_of(state: TrainState) -> Meter:
    """The meter of this rank's steps, for tokens/s over all ranks and MFU."""
    flops = state.model.flops_per_token(state.config.model.context)
    dtype = state.model.compute_dtype or state.model.embedding.dtype
    return Meter(flops, state.world.size, state.world.device, dtype)


def close(sinks: list[Sink], reason: str) -> None:
    """Closes every sink. One that fails, for example on a full disk, is reported on stderr and stops no other."""
    for sink in sinks:
        try:
            sink.close(reason)
        except OSError as error:
            print(f"warning: {type(sink).__name__} could not be closed: {error}", file=sys.stderr)
