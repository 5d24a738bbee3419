"""`train`: trains in a run directory, from its start or its last checkpoint to the planned end or an interruption."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import commits_of, with_commits
from ngpt_train.config.stored import read_yaml, with_first_values
from ngpt_train.core.errors import DataError, is_told_here, same_on_host
from ngpt_train.core.files import read_json
from ngpt_train.core.launcher import end_with_launcher
from ngpt_train.core.log import say_once
from ngpt_train.core.recorded import Sink
from ngpt_train.data import TrainLoader, open_dataset, reader_of
from ngpt_train.data.dataset import Dataset
from ngpt_train.data.tokenizers import read_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.layouts import PRECISIONS, resolve_precision, why_precision
from ngpt_train.distributed.world import World, join_world, resolve_device
from ngpt_train.evaluation.in_training import tasks_of
from ngpt_train.evaluation.trust import note_names
from ngpt_train.evaluation.validation import Evaluations
from ngpt_train.observe.sinks import build_sinks
from ngpt_train.observe.telemetry.collector import Telemetry
from ngpt_train.optim.optimizer import round_to_bf16_
from ngpt_train.report.ended_runs import plot_run
from ngpt_train.report.enough_memory import check_state_fits
from ngpt_train.training.checkpoint.catalogue import newest_undamaged, newest_with_config, step_of
from ngpt_train.training.checkpoint.load import load_model, load_state
from ngpt_train.training.feed import Feed
from ngpt_train.training.hooks.bad_steps import GoBack, describe, go_back
from ngpt_train.training.hooks.stopping import Patience, StopRequest
from ngpt_train.training.loop import TrainingRun, train
from ngpt_train.training.run_directory import DONE, RunDirectory, describe_start, initial_checkpoint
from ngpt_train.training.state import TrainState, build_state, check_kernels
from ngpt_train.verbs.train_hooks import add_hooks
from ngpt_train.verbs.train_notes import stopped_before_the_end

logger = logging.getLogger(__name__)


def main(config: Config, overrides: Sequence[str]) -> int:
    """Returns 0 when the run is done, or was interrupted and saved; a collective call. Raises ConfigError, DataError,
    NumericalError or DeviceMemoryError; each has its exit code."""
    end_with_launcher()
    stop = StopRequest(config.run.max_time)  # first of all: the time to prepare data counts
    directory = RunDirectory(config)
    with same_on_host():
        checkpoint = directory.check(config)  # only reads, so that a refusal comes before anything slow
        if checkpoint is None:
            initial_checkpoint(config)
        else:
            checkpoint = newest_with_config(directory.candidates(config))
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
    checkpoint = world.on_main(lambda: directory.check(config, data))
    found = world.on_main(lambda: directory.candidates(config)) if checkpoint else []
    checkpoint, damaged = newest_undamaged(found, world)
    last = config.train.stop_at or config.train.steps
    if checkpoint and step_of(checkpoint) >= last and directory.done:
        if world.is_main:
            by = "" if last == config.train.steps else f", by train.stop_at, of {config.train.steps}"
            at = f"the run is at step {step_of(checkpoint)} and would end at {last}{by}"
            print(f"{directory.path}: nothing to do, {at}.")
        return 0
    with stop:  # until everything is written, the curves too
        feed: Feed | None
        kernels = check_kernels(config, world, world.on_main(lambda: directory.kernels() if checkpoint else None))
        state, feed = begin_or_resume(config, world, data, checkpoint, stop)
        evaluations = Evaluations(data.validation, data.tokenizer, config)
        tasks = tasks_of(config, world)
        start = world.on_main(lambda: describe_start(state, data)) | kernels
        # Without a timeout: run.overwrite deletes files, which may take long.
        start = world.on_main_without_timeout(lambda: directory.open(config, start, checkpoint, damaged))
        telemetry = Telemetry(state) if config.logging.telemetry else None
        hooks = partial(add_hooks, directory, data, start, evaluations, tasks, telemetry)
        while feed is not None:
            feed = train_from(directory, state, feed, start, stop, hooks, data)
    return 0


def with_first_commits(config: Config, stored: Config) -> Config:
    """`config` with the commits of hub data sets in `stored`, with which the run began, where it names no commit."""
    data = with_commits(config.data, commits_of(stored.data))
    for name, commit in commits_of(data).items():
        if commit != (configured := commits_of(config.data)[name]):
            named = f"{configured} of {name}" if name else configured
            logger.info("data.revision=%s: the run goes on with %s, as it began", named, commit)
    return replace(config, data=data)


def trained_tokenizer(config: Config, checkpoint: Path | None) -> Tokenizer | None:
    """The tokenizer that the run made from its text, as its checkpoint has it; of a task with labels run.init_from's.
    None for any other new run, and for a run whose tokenizer comes from elsewhere."""
    if config.data.label_field is not None:
        checkpoint = checkpoint or initial_checkpoint(config)
    elif not config.tokenizer.from_text or config.data.kind == "tokens":
        return None
    return None if checkpoint is None else read_tokenizer(checkpoint, read_json(checkpoint / "tokenizer.json"))


def with_vocabulary(config: Config, data: Dataset) -> Config:
    """`config` with the tokenizer's size where model.vocab_size is auto. Raises DataError where it is smaller."""
    needed = data.tokenizer.vocab_size + config.data.own_ids
    if config.model.vocab_size == AUTO:
        return replace(config, model=replace(config.model, vocab_size=needed))
    if int(config.model.vocab_size) < needed:
        problem = f"model.vocab_size={config.model.vocab_size}: with {data.tokenizer.name} there are {needed} ids"
        raise DataError(f"{problem}. Use model.vocab_size=auto, or at least {needed}.")
    return config


def with_precision(config: Config, world: World) -> Config:
    """`config` with `train.precision` resolved, so that a resume on another device cannot change it silently."""
    dtype = resolve_precision(config.train.precision, world.device.type)
    precision = next(name for name, of_name in PRECISIONS.items() if of_name == dtype)
    if config.train.precision == AUTO:
        why = why_precision(world.device.type)
        say_once(logging.INFO, f"matrix products in {precision} (train.precision=auto: {why})")
    return replace(config, train=replace(config.train, precision=precision))


def begin_or_resume(
    config: Config, world: World, data: Dataset, checkpoint: Path | None, stop: StopRequest
) -> tuple[TrainState, Feed]:
    """The training state and the batches: of the checkpoint, or at step 0 with run.init_from's or initial weights."""
    state = build_state(config, world)
    position: dict[str, Any] | None = None
    if checkpoint:
        position = load_state(checkpoint, state, verified=True)
    elif initial := initial_checkpoint(config):
        trained = read_yaml(initial / "config.yaml").model
        load_model(initial, state.model, world, new_head=trained.n_classes != config.model.n_classes)
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


def train_from(
    directory: RunDirectory,
    state: TrainState,
    feed: Feed,
    start: dict[str, Any],
    stop: StopRequest,
    hooks: Callable[[TrainingRun], None],
    data: Dataset,
) -> Feed | None:
    """Trains, and whatever happens writes how it ended and closes feed, sinks and directory; a collective call.

    directory: the run's, which rank 0 has opened. start: rank 0's entry in run.json. hooks: adds the hooks to the run.
    Returns None at the end, or, where guards.rollback has taken the state back, the feed to go on with; then the
    directory stays open. Raises what `loop.train` raises.
    """
    config, world = state.config, state.world
    run = TrainingRun(state, feed, stop)
    run.sinks = sinks = list[Sink]()
    code, reason, told = 1, "failed", True
    again: Feed | None = None
    try:
        if world.is_main:
            sinks += build_sinks(config, directory.path, start, state.step or None, state.rollbacks)
        hooks(run)
        try:
            train(run)
        except GoBack as back:
            feed.close()
            again = open_feed(state, data, go_back(directory, state, back), stop)
            reason = describe(state.rollbacks[-1])
            return again
        code, reason = 0, run.reason or DONE
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        reason = f"{type(error).__name__}: {error}"
        told = is_told_here(error)
        raise
    finally:
        if again is None and (world.is_main or (code and told)):
            # First: wandb may take so long to close that torchrun kills.
            directory.finish(code, reason, state.step, world.rank)
        for hook in reversed(run.hooks):
            hook.close(run)
        feed.close()
        close(sinks, stopped_before_the_end(config) or reason if reason == DONE else reason)
        if again is None:
            directory.release()
    if world.is_main:
        print(f"curves: {plot_run(directory.path)}")
    return None


def close(sinks: list[Sink], reason: str) -> None:
    """Closes every sink. One that fails, for example on a full disk, is reported on stderr and stops no other."""
    for sink in sinks:
        try:
            sink.close(reason)
        except OSError as error:
            print(f"warning: {type(sink).__name__} could not be closed: {error}", file=sys.stderr)
