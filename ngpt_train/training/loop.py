"""When to step, log, save and evaluate. The only place that asks `step % n`."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ngpt_train.core.constants import ALARM
from ngpt_train.core.errors import DataError, told_by_rank_0
from ngpt_train.data import Position, data_hash
from ngpt_train.distributed import World
from ngpt_train.training.checkpoint.background import MOST_AT_THE_END, PAUSE, Attempts
from ngpt_train.training.guards import MAX_SKIPPED_IN_A_ROW, GoBack, NumericalError, explain_out_of_memory
from ngpt_train.training.replicas import check_replicas
from ngpt_train.training.signals import StoppedWaitingError, StopRequest, StopTogether
from ngpt_train.training.state import TrainState
from ngpt_train.training.step import NOBODY, MicroBatch, Observer, StepResult, train_step
from ngpt_train.training.watchdog import STEP

Record = dict[str, Any]


class Sink(Protocol):
    """Takes the records of a run: metrics.jsonl, the console, wandb. Only rank 0 has sinks."""

    def log(self, record: Record) -> None: ...
    def message(self, text: str) -> None: ...


class Meter(Protocol):
    """Turns the seconds of steps into rates, averaged over the steps since the last reading."""

    def data(self, seconds: float) -> None: ...
    def step(self, seconds: float, tokens: int) -> None: ...
    def read(self) -> Record: ...


@dataclass
class Parts:
    """The functions and objects that the loop needs beside the state."""

    batches: Iterator[tuple[Sequence[MicroBatch], Position]]
    evaluate: Callable[[TrainState], Record]  # collective
    save: Callable[[TrainState, Position, float], None]  # or begins to, with the step's loss; collective; DataError
    sinks: Sequence[Sink]
    meter: Meter
    after_step: Callable[[], None]  # tells the profiler that a step is over
    epoch_rows: Mapping[str, float] = field(default_factory=dict)  # of each source, "" without a mixture
    telemetry: Observer = NOBODY  # observes one step in logging.telemetry
    advice: Callable[[], str] = lambda: ""  # what to do once training has become meaningless
    # Of why: whether the run may go back to a good checkpoint. Collective; raises NumericalError once it has too often.
    may_go_back: Callable[[str], bool] = lambda why: False
    # Waits for the save under way; returns whether one is complete since the last call. Collective; raises DataError.
    # Its argument says what waits.
    settle: Callable[[str], bool] = lambda waiting: False
    save_has_failed: Callable[[], bool] = lambda: False  # on this rank, and `settle` has not told yet
    # Of (what, step): inside, the watchdog knows what this rank does.
    during: Callable[[str, int], AbstractContextManager[None]] = lambda doing, step: nullcontext()
    evaluate_tasks: Callable[[TrainState], Record] | None = None  # with eval.tasks; collective
    sample: Callable[[TrainState], Record] | None = None  # of text, with logging.sample_prompt; collective


def train(state: TrainState, parts: Parts, stop: StopRequest) -> str | None:
    """Trains from state.step to train.steps, or to train.stop_at, or until a rank is told to stop.

    At a step with both, the checkpoint is saved before the evaluation, so that an evaluation that fails loses nothing.
    Nothing is saved while steps are skipped, because their weights may be those that made the gradients infinite. Only
    the planned end is saved after one skipped step: the same command could not get beyond it.

    Returns why the run stopped early, None at the planned end. Raises NumericalError, DeviceMemoryError, ReplicaError,
    DataError if the last checkpoint could not be written, and GoBack with guards.rollback.
    """
    config, world = state.config, state.world
    last = config.train.stop_at or config.train.steps
    guards = state.guards
    after: dict[int, Position] = {}  # the positions after the steps since the guards were last asked
    reported: set[str] = set()  # names of skipped shards
    spent_until: dict[int, Record] = {}  # by steps whose telemetry is not logged yet
    rows = torch.arange(world.rank, config.train.rows_per_step, world.size)  # as data/loader.py deals them
    stop_together = StopTogether(stop, world, state.step, news=parts.save_has_failed)
    attempts = Attempts(config.checkpoint.every)
    done: tuple[Position, StepResult] | None = None  # the last step of this start

    def log(record: Record) -> None:
        for sink in parts.sinks:
            sink.log(record)

    def warn(text: str) -> None:
        for sink in parts.sinks:
            sink.message(f"warning: {text}")

    def tell(error: DataError, at_the_end: bool = False) -> None:
        alarm, text = attempts.failed(error, state.step, at_the_end)
        for sink in parts.sinks:
            sink.message(f"{ALARM if alarm else 'warning: '}{text}")

    def settle(waiting: str = "") -> None:
        try:
            if parts.settle(waiting):
                attempts.succeeded()
        except DataError as error:
            tell(error)

    def save(position: Position, must: bool, loss: float) -> None:
        with parts.during("the checkpoint of step", state.step):
            settle(f"that of step {state.step}")
            for left in reversed(range(MOST_AT_THE_END if must else 1)):
                try:
                    parts.save(state, position, loss)
                    attempts.begun()
                    if must:
                        parts.settle("")
                    return
                except DataError as error:
                    if must and not left:
                        raise
                    tell(error, at_the_end=must)
                    time.sleep(PAUSE if must else 0)

    def log_telemetry() -> None:
        for record in parts.telemetry.records():
            log(record | spent_until.pop(record["step"]))

    def evaluate() -> None:
        with explain_out_of_memory(state.micro_rows), parts.during("the validation at step", state.step):
            metrics = parts.evaluate(state)
            sample = parts.sample(state) if parts.sample is not None else None
        log({"kind": "eval", "step": state.step, "tokens": int(state.tokens), **spent(state), **metrics})
        if sample is not None:
            log({"kind": "sample", "step": state.step, "tokens": int(state.tokens), **spent(state), **sample})

    def evaluate_tasks() -> None:
        every = config.eval.every if config.eval.tasks_every is None else config.eval.tasks_every
        if parts.evaluate_tasks is None or not (state.step >= last or _due(state.step, every)):
            return
        with explain_out_of_memory(state.micro_rows), parts.during("the tasks at step", state.step):
            metrics = parts.evaluate_tasks(state)
        log({"kind": "tasks", "step": state.step, "tokens": int(state.tokens), **spent(state), **metrics})

    # A run that was stopped between its last checkpoint and the evaluation at that step evaluates now.
    if state.step == 0 or state.step >= last or _due(state.step, config.eval.every):
        evaluate()
    if state.step:
        evaluate_tasks()
    while state.step < last:
        started = time.perf_counter()
        try:
            with parts.during("the rows of step", state.step + 1):
                micro_batches, position = next(parts.batches)
        except StoppedWaitingError:
            if world.size > 1:
                raise
            if done is not None and not int(guards.skipped_in_a_row) and not guards.bad_step():
                save(done[0], must=True, loss=float(done[1].loss))
            return stop.reason
        fetched = time.perf_counter()
        for name in position.skipped.keys() - reported:
            warn(f"data.on_bad_shard=skip leaves out {name}: {position.skipped[name]}")
        reported |= position.skipped.keys()
        observer = parts.telemetry if _due(state.step + 1, config.logging.telemetry) else NOBODY
        with explain_out_of_memory(state.micro_rows), parts.during(STEP, state.step + 1):
            untouched = done is not None  # before the first step, the weights may have been loaded
            result = train_step(state, micro_batches, untouched=untouched, rows=rows, observer=observer)
        done = position, result
        state.interval.add(result)
        guards.add(result, state.step)
        if config.guards.rollback:
            after[state.step] = position
        logging = _due(state.step, config.logging.every)
        evaluating = _due(state.step, config.eval.every)
        # Reading the loss waits for the device, so that the seconds below are those that the steps took. A checkpoint
        # or a validation would wait for it too, and be charged with these seconds.
        waiting = logging or evaluating or _due(state.step, config.checkpoint.every) or state.step == last
        loss = float(result.loss) if waiting else None
        seconds = time.perf_counter() - started
        parts.meter.data(fetched - started)
        parts.meter.step(seconds, tokens_per_step(state))
        if state.train_seconds is not None:
            state.train_seconds += seconds
        if observer is not NOBODY:
            spent_until[state.step] = spent(state)
        if logging:
            log(train_record(state, parts, result, position, loss))
            state.interval.reset()
        parts.after_step()
        reason = stop_together.reason(state.step)
        if stop_together.heard:
            with parts.during("the checkpoint of step", state.step):
                settle()
        ending = reason is not None or state.step == last
        saving = ending or _due(state.step, config.checkpoint.every) or attempts.due(state.step)
        if logging or saving:
            log_telemetry()  # here the host waits for the device anyway
            if bad_step := guards.bad_step():
                with parts.during("the checkpoint of step", state.step):
                    settle("the way back")
                if parts.may_go_back(guards.why()):
                    raise GoBack(bad_step, after[bad_step], guards.why(), guards.facts())
                warn(f"{guards.why()}, and there is no good checkpoint to go back to.")
                guards.forget()
            after.clear()
            skipped = int(guards.skipped_in_a_row)
            if skipped >= MAX_SKIPPED_IN_A_ROW or (skipped > 1 and state.step == last):
                raise told_by_rank_0(meaningless(state, parts, skipped))
        if saving or _due(state.step, config.parallel.check_replicas):
            check_replicas(state)
        if saving and skipped and state.step < last:
            warn(f"no checkpoint at step {state.step}: the gradients of the last {skipped} steps were not finite.")
        elif saving:
            save(position, must=ending, loss=float(result.loss))
        if reason is not None and state.step < last:
            return reason
        if evaluating or state.step == last:
            evaluate()
        evaluate_tasks()
    return None


def train_record(state: TrainState, parts: Parts, result: StepResult, position: Position, loss: float | None) -> Record:
    """The record of the step that gave `result`, and of the interval that it ends: docs/records.md has the fields.

    position: of this rank after the step. loss: result.loss as a number. A collective call, which waits for the device.
    """
    of_all_ranks = seen(position, state.world)
    return {
        "kind": "train",
        "step": state.step,
        "loss": loss,
        "loss_mean": state.interval.loss_mean,
        **({} if result.z_loss is None else {"z_loss": float(result.z_loss)}),
        **({} if result.loss_scale is None else {"loss_scale": float(result.loss_scale)}),
        "lr": result.lr,
        "grad_norm": float(result.grad_norm),
        "tokens": int(state.tokens),
        **spent(state),
        **epochs(position.rows, of_all_ranks.get("rows"), parts.epoch_rows),
        **of_all_ranks,
        **padding(state),
        **parts.meter.read(),
        "skipped": state.interval.n_skipped,
        "clipped": state.interval.clipped,
    }


def spent(state: TrainState) -> Record:
    """train_seconds: of wall time in training steps, waits for data included; validations and checkpoints are not.

    flops: of all steps so far by the usual convention (models/flops.py). Skipped steps and padding count: they were
    computed.
    """
    tokens = state.step * tokens_per_step(state)
    return {
        "train_seconds": state.train_seconds,
        "flops": float(tokens * state.model.flops_per_token(state.config.model.context)),
    }


def tokens_per_step(state: TrainState) -> int:
    """Targets of a step over all ranks, padding included."""
    return state.config.train.rows_per_step * state.config.model.context


def epochs(rows: int, rows_by_source: Mapping[str, int] | None, epoch_rows: Mapping[str, float]) -> Record:
    """epochs: how often the training text has been read, of streamed text an estimate; None on ranks that log nothing.
    rows: of the run so far.

    Of a mixture, of the source that has been read most often; epochs_by_source has them all.
    """
    if rows_by_source is None:
        return {"epochs": rows / epoch_rows[""] if "" in epoch_rows else None}
    by_source = {name: rows / epoch_rows[name] for name, rows in rows_by_source.items() if name in epoch_rows}
    return {"epochs": max(by_source.values(), default=None), "epochs_by_source": by_source}


def padding(state: TrainState) -> Record:
    """{"padding": share of all targets so far that do not count} if rows are padded, else {}."""
    pads = state.config.data.pack == "best_fit"
    return {"padding": 1 - int(state.tokens) / (state.step * tokens_per_step(state))} if pads else {}


def seen(position: Position, world: World) -> Record:
    """data_hash of the rows that all ranks have consumed and, with a mixture, the rows of each source. Collective."""
    # data_hash is a sum modulo 2^64. Its two halves are summed apart, because the sums must stay below 2^63.
    upper, lower, *rows = world.sum_of([*divmod(position.data_hash, 2**32), *position.rows_by_source.values()])
    by_source = dict(zip(position.rows_by_source, rows, strict=True))
    return {"data_hash": data_hash([(upper << 32) + lower])} | ({"rows": by_source} if by_source else {})


def meaningless(state: TrainState, parts: Parts, skipped: int) -> NumericalError:
    """The error of a run whose last `skipped` steps had a gradient that is not finite."""
    in_fp16 = " The loss scale is 1: if fp16 overflows, use another precision." if state.loss_scale else ""
    return NumericalError(
        f"{skipped} steps in a row, up to step {state.step}, had a gradient that is not finite and were skipped. "
        f"{parts.advice()}, or look at the data after step {state.step - skipped}.{in_fp16}"
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
