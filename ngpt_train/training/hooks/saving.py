"""When a run saves (every checkpoint.every steps, at its end, and again soon after a save that has failed), beside
training or, with checkpoint.async=false, while it waits.

Beside training, a step waits only until the state is copied. A thread then writes the copy, with a process group of
its own. It ends with one outcome for all ranks, which is told when they next meet.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.keys import AUTO
from ngpt_train.core.errors import DataError, in_one_line
from ngpt_train.core.files import text_of
from ngpt_train.core.recorded import ALARM
from ngpt_train.data.loader import merged
from ngpt_train.distributed.world import RankLostError
from ngpt_train.training.checkpoint.save import Checkpoints, OfPath, Snapshot, gb
from ngpt_train.training.checkpoint.tensor_files import Piece, Place
from ngpt_train.training.loop import Hook, TrainingRun, due
from ngpt_train.training.state import TrainState

ALARMING = 3  # failures in a row
MOST_AT_THE_END = 3  # attempts to save the last step
PAUSE = 1.0  # seconds between them
SOONER = 10  # the next attempt comes after checkpoint.every / SOONER steps
MOST_MEMORY = 0.5  # share of a host's free memory for the copies: data workers and the system need some, too


class SaveCheckpoints(Hook):
    """Saves beside training, or while it waits (checkpoint.async). After a failure the run goes on and tries again
    soon; the third in a row is an alarm. The last step of a start must be saved, or the start fails.

    Nothing is saved while steps are skipped, because the weights may be the reason. Only the end of a start is saved
    after one skipped step: a planned end could not be got beyond by the same command, another would lose steps.
    """

    def __init__(self, run: TrainingRun, checkpoints: Checkpoints, saved: OfPath, add_files: OfPath) -> None:
        """On rank 0 `saved` gets each complete checkpoint, `add_files` writes more files. A collective call."""
        self._saves = Saves(checkpoints, run.state, saved, run.say)
        self.has_failed = self._saves.has_failed
        self._add_files = add_files
        self._every = run.state.config.checkpoint.every
        self._failures = 0  # in a row
        self._again: int | None = None  # a failed save is tried again after this step

    def start(self, run: TrainingRun) -> None:
        run.say(self._saves.described)

    def waits(self, run: TrainingRun) -> bool:
        return due(run.step, self._every)

    def after_step(self, run: TrainingRun) -> None:
        run.saving |= due(run.step, self._every) or (self._again is not None and run.step >= self._again)

    def save(self, run: TrainingRun) -> None:
        if run.skipped > (1 if run.ends else 0):  # one skipped step leaves weights and moments as they were
            skipped = f"the gradients of the last {run.skipped} steps were not finite"
            run.warn(f"no checkpoint at step {run.step}: {skipped}.")
            return
        assert run.position is not None
        assert run.result is not None
        loss = float(run.result.loss)
        with run.during("the checkpoint of step", run.step):
            self._settle(run, f"the checkpoint of step {run.step}")
            for left in reversed(range(MOST_AT_THE_END if run.ends else 1)):
                try:
                    position = merged(run.state.world.gather(run.position))
                    self._saves.save(run.state, position, self._add_files, loss)
                    self._again = None
                    if run.ends:
                        self._saves.settle()
                    return
                except DataError as error:
                    if run.ends and not left:
                        raise
                    self._tell(run, error, at_the_end=run.ends)
                    time.sleep(PAUSE if run.ends else 0)

    def settle(self, run: TrainingRun, waiting: str = "") -> None:
        """Waits for the save under way, and says so with the reason `waiting`. Warns of a failure. Collective."""
        with run.during("the checkpoint of step", run.step):
            self._settle(run, waiting)

    def _settle(self, run: TrainingRun, waiting: str) -> None:
        try:
            if self._saves.settle(waiting):
                self._failures, self._again = 0, None
        except DataError as error:
            self._tell(run, error, at_the_end=False)

    def _tell(self, run: TrainingRun, error: DataError, at_the_end: bool) -> None:
        self._failures += 1
        self._again = run.step + max(1, self._every // SOONER)
        again = f"Training goes on; the next attempt follows step {self._again}."
        text = f"{error} {'It is tried again.' if at_the_end else again}"
        if self._failures % ALARMING:
            run.warn(text)
        else:
            in_a_row = f"{self._failures} saves in a row have failed"
            run.say(f"{ALARM}{in_a_row}, and unsaved steps are lost if the run ends. {text}")

    def finish(self, run: TrainingRun) -> None:
        self._saves.settle()

    def close(self, run: TrainingRun) -> None:
        with run.during("the checkpoint of step", run.step):
            self._saves.close()


class Saves:
    """The saves of one start of a run: in order, and one at a time. saved: called on rank 0 with each complete
    checkpoint, from the thread if there is one. say: takes one line for people, from the main thread alone. The
    constructor is a collective call."""

    def __init__(self, checkpoints: Checkpoints, state: TrainState, saved: OfPath, say: Callable[[str], None]) -> None:
        self._checkpoints, self._saved, self._say = checkpoints, saved, say
        beside, why = resolve_asynchronous(state.config.checkpoint.asynchronous, state)
        self.described = f"checkpoints are written {'beside training' if beside else 'while training waits'} ({why})"
        self._staging = Staging(state.world.device, state.optimizer) if beside else None
        self._world = state.world.beside() if beside else state.world
        self._thread: threading.Thread | None = None
        self._step = 0  # of the last save
        self._complete: Path | None = None  # the checkpoint of the last save, until `tell` has named it
        self._error: Exception | None = None
        self._unsettled = False  # True if a save has been complete since the last `settle`

    def save(self, state: TrainState, position: Mapping[str, Any], add_files: OfPath, loss: float | None) -> None:
        """Begins a save; without staging, also ends it. Arguments and errors as for Checkpoints.snapshot and write.
        Call `settle` between two saves."""
        assert self._thread is None
        snapshot = self._checkpoints.snapshot(state, position, add_files, loss)
        self._step = state.step
        if self._staging is None:
            self._write(snapshot)
            self.tell()
            return
        try:
            snapshot = replace(snapshot, pieces=self._staging.copy(snapshot.pieces))
        except Exception as error:  # no memory on this rank: `write` tells the others
            snapshot = replace(snapshot, problem=in_one_line(error))
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def settle(self, waiting: str = "") -> bool:
        """Waits for the save under way, and says so with the reason `waiting`. Returns True if a save has been complete
        since the last call. A collective call; an error of the save is raised on every rank."""
        if self._thread is not None:
            if waiting and self._thread.is_alive():
                began = time.monotonic()
                self._say(f"the checkpoint of step {self._step} is still being written; {waiting} waits for it")
                self._thread.join()
                self._say(f"waited {time.monotonic() - began:.1f} s for the checkpoint of step {self._step}")
            self._thread.join()
            self._thread = None
        self.tell()
        done, self._unsettled = self._unsettled, False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return done

    def has_failed(self) -> bool:
        """True if `settle` will raise an error. Called often, so it also names the checkpoint that is complete."""
        self.tell()
        return self._error is not None

    def tell(self) -> None:
        """Names the checkpoint that has been completed, once."""
        complete, self._complete = self._complete, None
        if complete is not None:
            self._say(f"saved {complete}")

    def close(self) -> None:
        """Waits for the save under way; its error is a warning, because the run may end with another."""
        if self._thread is not None:
            self._thread.join()
        self.tell()
        if self._error is not None:
            self._say(f"warning: {self._error}")

    def _run(self, snapshot: Snapshot) -> None:
        assert self._staging is not None
        try:
            self._staging.wait()
            self._write(snapshot)
        except RankLostError as error:
            path = self._checkpoints.directory / f"step_{snapshot.step:08d}"
            self._error = RankLostError(
                f"The checkpoint {path} could not be written: {error}. The same command goes on from the last one"
            )
        except Exception as error:
            self._error = error

    def _write(self, snapshot: Snapshot) -> None:
        path = self._checkpoints.write(snapshot, self._world, self._note)
        self._complete, self._unsettled = path, True

    def _note(self, path: Path) -> None:
        if self._world.is_main:
            self._saved(path)


class Staging:
    """Buffers for the pieces that this rank writes, in the host's memory, used again for each checkpoint. On a GPU they
    are pinned, and a stream of its own fills them. The host does not wait. On the device the optimizer's next step
    waits for the copies, because it overwrites their sources."""

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self._buffers: dict[Place, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        if self._stream is not None:
            optimizer.register_step_pre_hook(lambda *_: self._hold_back_the_device())

    def copy(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Copies of the pieces. Read them after `wait` and before the next call. Raises RuntimeError without memory."""
        if self._stream is None:
            return tuple(self._copy(piece) for piece in pieces)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = tuple(self._copy(piece) for piece in pieces)
            self._copied = self._stream.record_event()
        return copies

    def wait(self) -> None:
        """Waits until the device has copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, piece: Piece) -> Piece:
        rows = piece.rows
        buffer = self._buffers.get(piece.place)
        if buffer is None or buffer.shape != rows.shape:
            buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self._stream is not None)
            self._buffers[piece.place] = buffer
        if self._stream is not None and rows.is_cuda:
            rows.record_stream(self._stream)  # temporary rows must keep their memory until they are copied
        return replace(piece, rows=buffer.copy_(rows, non_blocking=True))

    def _hold_back_the_device(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)


def staged_bytes(state: TrainState) -> int:
    """Estimated bytes of this rank's copies: its share of weights, Adam's two moments and the moving average."""
    parts = 3 if state.ema is None else 4
    return parts * sum(weight.nbytes for weight in state.model.parameters()) // state.world.size


def resolve_asynchronous(asked: bool | str, state: TrainState) -> tuple[bool, str]:
    """`checkpoint.async` with auto resolved, and the reason as a sentence. A collective call."""
    if asked != AUTO:
        return bool(asked), f"checkpoint.async={str(asked).lower()}"
    world = state.world
    needed, free = staged_bytes(state) * world.local_size, available_memory()
    fits = free is None or needed <= MOST_MEMORY * free
    chosen = not world.largest([not fits])[0]
    of_free = f"of {gb(free)} of its memory that are free" if free is not None else "of its memory"
    elsewhere = "" if chosen or not fits else "; another host has too little"
    return chosen, f"checkpoint.async=auto: copies of the state take {gb(needed)} on this host, {of_free}{elsewhere}"


def available_memory() -> int | None:
    """Bytes of free memory, by the machine and by the control group of this process; None if unknown."""
    found = []
    meminfo = text_of(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        found.append(1024 * int(meminfo.partition("MemAvailable:")[2].split()[0]))
    limit, used = (text_of(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        found.append(int(limit) - int(used))
    return min(found) if found else None
