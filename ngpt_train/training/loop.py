"""The loop over steps. Everything beside the steps is a hook: hooks/__init__.py has their moments."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from ngpt_train.core.recorded import Record, Sink
from ngpt_train.training.guards import explain_out_of_memory
from ngpt_train.training.step import NOBODY, train_step

if TYPE_CHECKING:
    from ngpt_train.data.loader import Position
    from ngpt_train.training.hooks.stopping import StopRequest
    from ngpt_train.training.state import TrainState
    from ngpt_train.training.step import MicroBatch, Observer, StepResult

Moment = Literal["start", "before_step", "after_step", "check", "save", "evaluate"]
STEP = "step"  # `doing` of the step itself, for `during`


class Hook:
    """Does something at some moments of a run, and nothing at the others. Every rank has the same hooks in the same
    order, so a moment may be a collective call. Reading from the device waits for it and slows the step down: read only
    where `run.rests`, or after steps for which `waits` is true."""

    def around(self, run: TrainingRun) -> AbstractContextManager[Any]:
        """Everything from `start` to `finish` happens inside."""
        return nullcontext()

    def start(self, run: TrainingRun) -> None:
        """Before the first step of this start; after a resume the checkpoint is loaded."""

    def before_step(self, run: TrainingRun) -> None:
        """The rows of the next step are here. `run.position` is the position after them."""

    def waits(self, run: TrainingRun) -> bool:
        """True if this hook will read from the device after this step. Then the loop reads the loss first, so that the
        step's seconds are complete."""
        return False

    def after_step(self, run: TrainingRun) -> None:
        """After the step. A hook sets `run.saving` to save it; `run.reason`, on every rank, to end the run, saved."""

    def check(self, run: TrainingRun) -> None:
        """Before the step is saved. Raises the error that ends the run if the state is not worth a checkpoint."""

    def save(self, run: TrainingRun) -> None:
        """Called only where `run.saving`."""

    def evaluate(self, run: TrainingRun) -> None:
        """The step is saved, so that a failure loses nothing. Not called where the run stops early after this step."""

    def finish(self, run: TrainingRun) -> None:
        """After the last step, unless the run has failed; the last hook first."""

    def close(self, run: TrainingRun) -> None:
        """At the end of this start, whatever has happened; the last hook first."""

    def during(self, doing: str, step: int) -> AbstractContextManager[Any]:
        """Inside, this rank is `doing` something at `step`: "the validation at step", 100."""
        return nullcontext()


@dataclass
class TrainingRun:
    """Everything that the loop and its hooks share: the state, its rows, and the last step."""

    state: TrainState
    batches: Iterator[tuple[Sequence[MicroBatch], Position]]
    stop: StopRequest
    hooks: list[Hook] = field(default_factory=list)
    sinks: Sequence[Sink] = ()
    position: Position | None = None  # in the data, of this rank, after the last step
    result: StepResult | None = None  # of the last step of this start
    loss: float | None = None  # result.loss, where the device was waited for
    data_seconds: float = 0.0  # the wait for the rows of the step
    seconds: float = 0.0  # the whole step, data_seconds included
    observer: Observer | None = None  # looks at the next step
    saving: bool = False  # this step becomes a checkpoint
    skipped: int = 0  # skipped steps in a row, when the guards last looked
    reason: str | None = None  # why the run ends early, after this step

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.state.step

    @property
    def last(self) -> int:
        """The last step of this start by plan."""
        return self.state.config.train.stop_at or self.state.config.train.steps

    @property
    def ends(self) -> bool:
        """True if this step is the last of this start, planned or not."""
        return self.reason is not None or self.step == self.last

    @property
    def rests(self) -> bool:
        """True if the host waits for the device after this step anyway, for a record or a checkpoint."""
        return self.saving or due(self.step, self.state.config.logging.every)

    def at(self, moment: Moment) -> None:
        """Calls this moment of every hook."""
        for hook in self.hooks:
            getattr(hook, moment)(self)

    @contextmanager
    def around(self) -> Iterator[None]:
        """The hooks' `around`, the first hook's outermost."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.around(self))
            yield

    @contextmanager
    def during(self, doing: str, step: int) -> Iterator[None]:
        """The hooks' `during`."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.during(doing, step))
            yield

    def record(self, kind: str) -> Record:
        """The shared fields of all records; a hook adds its numbers."""
        return {"kind": kind, "step": self.step, "tokens": int(self.state.tokens), **self.spent()}

    def spent(self) -> Record:
        """train_seconds: wall time in training steps and waits for data, without validations and checkpoints. flops: of
        all steps so far by the usual convention (models/decoder.py). Skipped steps and padding count."""
        flops = self.state.model.flops_per_token(self.state.config.model.context) * self.step * self.tokens_per_step
        return {"train_seconds": self.state.train_seconds, "flops": float(flops)}

    @property
    def tokens_per_step(self) -> int:
        """Targets of a step over all ranks, padding included."""
        return self.state.config.train.rows_per_step * self.state.config.model.context

    def log(self, record: Record) -> None:
        """Gives a record to every sink."""
        for sink in self.sinks:
            sink.log(record)

    def say(self, text: str) -> None:
        """Gives one line for people to every sink."""
        for sink in self.sinks:
            sink.message(text)

    def warn(self, text: str) -> None:
        """Says `text` as a warning."""
        self.say(f"warning: {text}")


def due(step: int, every: int) -> bool:
    """True if `step` is a multiple of `every`; never, if that is 0."""
    return every > 0 and step % every == 0


class StoppedWaitingError(RuntimeError):
    """The process was told to stop while it waited for rows; no step has begun."""

    exit_code = 1


def train(run: TrainingRun) -> str | None:
    """Trains from state.step to train.steps, or to train.stop_at, or until a hook sets `run.reason`. Returns why the
    run stopped early; None at the planned end. Errors of hooks pass; raises DeviceMemoryError."""
    with run.around():
        run.at("start")
        while run.step < run.last and run.reason is None:
            if not take_step(run):
                save_while_waiting(run)
                break
            run.at("after_step")
            if run.step == run.last:
                run.reason = None  # the planned end does not come early
            run.saving = run.saving or run.ends
            run.at("check")
            if run.saving:
                run.at("save")
            if run.reason is None:
                run.at("evaluate")
        for hook in reversed(run.hooks):
            hook.finish(run)
    return run.reason


def take_step(run: TrainingRun) -> bool:
    """Waits for the rows of the next step and takes it; False if the run was told to stop while it waited."""
    state = run.state
    started = time.perf_counter()
    try:
        with run.during("the rows of step", run.step + 1):
            micro_batches, run.position = next(run.batches)
    except StoppedWaitingError:
        if state.world.size > 1:
            raise
        return False
    fetched = time.perf_counter()
    run.observer, run.saving = None, False
    run.at("before_step")
    # The numbers of this rank's rows, as data/loader.py deals them.
    rows = state.world.rank + state.world.size * torch.arange(sum(len(batch[0]) for batch in micro_batches))
    with explain_out_of_memory(state.micro_rows), run.during(STEP, run.step + 1):
        untouched = run.result is not None  # before the first step, the weights may have been loaded
        run.result = train_step(state, micro_batches, untouched=untouched, rows=rows, observer=run.observer or NOBODY)
    state.interval.add(run.result)
    state.guards.add(run.result, run.step)
    # Reading the loss waits for the device, so that `seconds` holds all of the step. Otherwise a checkpoint or a
    # validation would wait for the device, and the step's time would count as theirs.
    waits = run.step == run.last or any(hook.waits(run) for hook in run.hooks)
    run.loss = float(run.result.loss) if waits else None
    run.data_seconds, run.seconds = fetched - started, time.perf_counter() - started
    state.train_seconds += run.seconds
    return True


def save_while_waiting(run: TrainingRun) -> None:
    """Saves the last step after a wait for rows, unless it and the one before were skipped, or a rollback is due."""
    run.reason = run.stop.reason
    run.skipped = int(run.state.guards.skipped_in_a_row)
    run.saving = run.result is not None and run.skipped < 2 and not run.state.guards.bad_step()
    if run.saving:
        run.at("save")
