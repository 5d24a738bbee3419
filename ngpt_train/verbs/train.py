"""`train`: from a config to a finished, or cleanly interrupted, run directory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngpt_train.config import write_yaml
from ngpt_train.config.schema import AUTO, Config, DataError
from ngpt_train.data import Dataset, LoaderState, TrainLoader, open_dataset, write_tokenizer
from ngpt_train.distributed import World, join_world
from ngpt_train.evaluation import Validation, unigram_loss
from ngpt_train.observe import Sink, build_sinks
from ngpt_train.observe.meters import Meter
from ngpt_train.report.curves import plot_run
from ngpt_train.training import TrainState, build_state
from ngpt_train.training.checkpoint import Checkpoints, load_model, load_state, step_of, write_json
from ngpt_train.training.loop import Parts, Position, train
from ngpt_train.training.profile import profiled
from ngpt_train.training.provenance import describe_start
from ngpt_train.training.run_directory import RunDirectory, initial_checkpoint
from ngpt_train.training.signals import StopRequest


def main(config: Config, overrides: Sequence[str]) -> int:
    """Returns 0 when the run is done, or was interrupted and saved; raises what the exit codes stand for."""
    run = RunDirectory(config)
    run.check(config)  # before anything slow; reads only
    initial_checkpoint(config)
    data = open_dataset(config)
    config = with_vocabulary(config, data)
    world = join_world(config)
    checkpoint = world.on_main(lambda: run.check(config, data.fingerprint))
    last = min(config.train.stop_at or config.train.steps, config.train.steps)
    if checkpoint and step_of(checkpoint) >= last:
        if world.is_main:
            print(f"{run.path}: nothing to do, the run is at step {step_of(checkpoint)} of {last} already.")
    else:
        state, loader = prepare_state(config, world, data, checkpoint)
        validation = Validation(data.validation, data.tokenizer.n_bytes, config.model.context, config.eval.rows)
        start = describe_start(state, data)
        world.on_main(lambda: run.open(config, start))
        train_in(run, state, loader, validation, data, start, last)
    return 0


def with_vocabulary(config: Config, data: Dataset) -> Config:
    """The config with `model.vocab_size` known; raises DataError where the model's is too small for the tokenizer."""
    needed = data.tokenizer.vocab_size
    if config.model.vocab_size == AUTO:
        return replace(config, model=replace(config.model, vocab_size=needed))
    if int(config.model.vocab_size) < needed:
        raise DataError(
            f"model.vocab_size={config.model.vocab_size}: the tokenizer {data.tokenizer.name} has {needed} ids. "
            f"Use model.vocab_size=auto, or at least {needed}."
        )
    return config


def prepare_state(
    config: Config, world: World, data: Dataset, checkpoint: Path | None
) -> tuple[TrainState, TrainLoader]:
    """The state and the data at the checkpoint, at run.init_from, or at the very start."""
    state = build_state(config, world)
    position: LoaderState | None = None
    initial = initial_checkpoint(config)
    if checkpoint:
        position = LoaderState(rows=load_state(checkpoint, state)["rows"])
    elif initial:
        load_model(initial, state.model, world)
        state.model.project_()
    loader = TrainLoader(
        data.train,
        context=config.model.context,
        batch_rows=int(config.train.batch_rows or 0),
        micro_rows=state.micro_rows,
        seed=config.run.seed,
        rank=world.rank,
        world_size=world.size,
        state=position,
    )
    return state, loader


def train_in(
    run: RunDirectory,
    state: TrainState,
    loader: TrainLoader,
    validation: Validation,
    data: Dataset,
    start: dict[str, Any],
    last: int,
) -> None:
    """Trains in the directory that rank 0 has opened, and closes it whatever happens."""
    config, world = state.config, state.world
    checkpoints = Checkpoints(run.checkpoints, world, config.checkpoint.keep_last, config.checkpoint.keep_every)
    resumed = state.step or None
    sinks: list[Sink] = build_sinks(config, run.path, start, last, resumed) if world.is_main else []

    def say(text: str) -> None:
        for sink in sinks:
            sink.message(text)

    def add_files(directory: Path) -> None:
        write_yaml(config, directory / "config.yaml")
        write_json(directory / "tokenizer.json", write_tokenizer(data.tokenizer, directory))

    def save(state: TrainState, position: Position) -> None:
        say(f"saved {checkpoints.save(state, position, add_files)}")

    last_evaluation: dict[str, Any] = {}

    def evaluate(state: TrainState) -> dict[str, Any]:
        last_evaluation.update(validation(state.model, world))
        return dict(last_evaluation)

    code, reason = 1, "failed"
    try:
        introduce(say, run, state, start, resumed)
        unigram = unigram_loss(data.train, validation, int(config.model.vocab_size)) if world.is_main else 0.0
        say(f"a unigram model of the corpus reaches a validation loss of {unigram:.4f}")
        flops = state.model.flops_per_token(config.model.context)
        dtype = state.model.compute_dtype or state.model.embedding.dtype
        meter = Meter(flops, world.size, world.device, dtype)
        with (
            StopRequest(config.run.max_time) as stop,
            profiled(config.train.profile, run.path / "profile", world) as after_step,
        ):
            parts = Parts(loader, evaluate, save, sinks, meter, after_step)
            interruption = train(state, parts, stop)
        code, reason = 0, interruption or "done"
        if interruption:
            say(f"{interruption}: saved at step {state.step} of {last}; run the same command to continue")
        else:
            say(f"validation loss {last_evaluation['loss']:.4f}; a unigram model reaches {unigram:.4f}")
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        for sink in sinks:
            sink.close(reason)
        if world.is_main:
            run.finish(code, reason, state.step)
    if world.is_main:
        print(f"curves: {plot_run(run.path)}")


def introduce(say: Any, run: RunDirectory, state: TrainState, start: dict[str, Any], resumed: int | None) -> None:
    """What a reader of the log wants to know first."""
    config = state.config
    tokens = int(config.train.batch_rows or 0) * config.model.context
    accumulation = int(config.train.batch_rows or 0) // state.micro_rows // state.world.size
    say(f"run {run.path}: {'resumed at step ' + str(resumed) if resumed else 'new'}")
    say(
        f"{config.model.name} with {start['n_params']:,} parameters, vocabulary {config.model.vocab_size} "
        f"({start['tokenizer']}), context {config.model.context}"
    )
    say(
        f"{tokens:,} tokens per step: {state.world.size} rank(s) x {accumulation} x {state.micro_rows} rows, "
        f"{start['parallel']} on {start['device']}, {state.model.compute_dtype}"
    )
    say(f"{config.optim.name}, lr {config.optim.lr:g}, {config.schedule.kind} over {config.train.steps} steps")
