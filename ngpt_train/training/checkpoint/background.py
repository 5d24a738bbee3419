"""Saves checkpoints beside training, or, with checkpoint.async=false, while it waits.

Beside training, a step waits only until the state is copied. A thread then writes the copy, with a process group of
its own. It ends with one outcome for all ranks, which is told when they next meet. After a failure the run goes on and
tries again soon, and the third in a row is an alarm.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngpt_train.distributed.long_work import RankLostError
from ngpt_train.training.checkpoint.save import Checkpoints, Snapshot
from ngpt_train.training.checkpoint.staging import Staging, resolve_asynchronous
from ngpt_train.training.checkpoint.tensors import describe_error
from ngpt_train.training.state import TrainState

ALARM = 3  # failures in a row
MOST_AT_THE_END = 3  # attempts to save the last step
PAUSE = 1.0  # seconds between them
SOONER = 10  # the next attempt comes after this part of checkpoint.every


class Saves:
    """The saves of one start of a run: in order, and one at a time.

    saved: called on rank 0 with each complete checkpoint, by the thread if there is one. say: takes one line for
    people; only the main thread calls it. The constructor is a collective call.
    """

    def __init__(
        self, checkpoints: Checkpoints, state: TrainState, saved: Callable[[Path], None], say: Callable[[str], None]
    ) -> None:
        self._checkpoints, self._saved, self._say = checkpoints, saved, say
        beside, why = resolve_asynchronous(state.config.checkpoint.asynchronous, state)
        self.described = f"checkpoints are written {'beside training' if beside else 'while training waits'} ({why})"
        self._staging = Staging(state.world.device, state.optimizer) if beside else None
        self._world = state.world.beside() if beside else state.world
        self._thread: threading.Thread | None = None
        self._step = 0  # of the last save
        self._complete: Path | None = None  # what the last save has made, until it is told
        self._error: Exception | None = None
        self._unsettled = False  # whether a save has been complete since the last call of `settle`

    def save(
        self, state: TrainState, position: Mapping[str, Any], add_files: Callable[[Path], None], loss: float | None
    ) -> None:
        """Begins a save, or, without staging, makes it; arguments and errors as of Checkpoints.save. `settle` must have
        been called since the last one."""
        assert self._thread is None
        snapshot = self._checkpoints.snapshot(state, position, add_files, loss)
        self._step = state.step
        if self._staging is None:
            self._write(snapshot)
            self.tell()
            return
        try:
            snapshot = replace(snapshot, pieces=self._staging.copy(snapshot.pieces))
        except Exception as error:  # no memory on this rank: the others hear of it where all write
            snapshot = replace(snapshot, problem=describe_error(error))
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def settle(self, waiting: str = "") -> bool:
        """Waits for the save under way, and says so with the reason `waiting`. Returns whether one has been completed
        since the last call. A collective call, which raises, on every rank, what the save has raised."""
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
        """Whether this rank knows of a failure that `settle` has yet to raise. Says, by the way, what is complete: the
        loop asks after each step."""
        self.tell()
        return self._error is not None

    def tell(self) -> None:
        """Says which checkpoint has been completed, once."""
        complete, self._complete = self._complete, None
        if complete is not None:
            self._say(f"saved {complete}")

    def close(self) -> None:
        """Waits for the save under way, at an end that has its own error to tell."""
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


class Attempts:
    """The saves of one start. every: checkpoint.every."""

    def __init__(self, every: int) -> None:
        self._pause = max(1, every // SOONER)
        self._in_a_row = 0
        self._again: int | None = None

    def due(self, step: int) -> bool:
        """Whether a save that has failed is tried again after `step`."""
        return self._again is not None and step >= self._again

    def begun(self) -> None:
        """A save is under way."""
        self._again = None

    def succeeded(self) -> None:
        self._in_a_row, self._again = 0, None

    def failed(self, error: Exception, step: int, at_the_end: bool = False) -> tuple[bool, str]:
        """Counts a failure that is known at `step`; returns whether it is an alarm, and what to say."""
        self._in_a_row += 1
        self._again = step + self._pause
        text = f"{error} Training goes on; the next attempt follows step {self._again}."
        if at_the_end:
            text = f"{error} It is tried again."
        if alarm := self._in_a_row % ALARM == 0:
            text = f"{self._in_a_row} saves in a row have failed, and what is not saved is lost if the run ends. {text}"
        return alarm, text
