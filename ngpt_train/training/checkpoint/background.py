"""Saves checkpoints beside training, or, with checkpoint.async=false, while it waits.

Beside training, a step waits only until the state is copied. A thread then writes the copy, with a process group of
its own. It ends with one outcome for all ranks, which is told when they next meet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngpt_train.config.keys import AUTO
from ngpt_train.core.files import text_of
from ngpt_train.distributed.world import RankLostError
from ngpt_train.training.checkpoint.save import Checkpoints, Snapshot, gb
from ngpt_train.training.checkpoint.tensor_files import Piece, Place, in_one_line

if TYPE_CHECKING:
    from ngpt_train.training.state import TrainState

MOST = 0.5  # share of a host's free memory for the copies: data workers and the system need some, too


class Saves:
    """The saves of one start of a run: in order, and one at a time.

    saved: called on rank 0 with each complete checkpoint, from the thread if there is one. say: takes one line for
    people, from the main thread alone. The constructor is a collective call.
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
        self._complete: Path | None = None  # the checkpoint of the last save, until `tell` has named it
        self._error: Exception | None = None
        self._unsettled = False  # True if a save has been complete since the last `settle`

    def save(
        self, state: TrainState, position: Mapping[str, Any], add_files: Callable[[Path], None], loss: float | None
    ) -> None:
        """Begins a save; without staging, also ends it. Arguments and errors as for Checkpoints.save. Call `settle`
        between two saves."""
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
    """Buffers for the pieces that this rank writes, in the host's memory, used again for each checkpoint.

    On a GPU they are pinned, and a stream of its own fills them. The host does not wait. On the device the optimizer's
    next step waits for the copies, because it overwrites their sources.
    """

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
    return (
        parts * sum(weight.numel() * weight.element_size() for weight in state.model.parameters()) // state.world.size
    )


def resolve_asynchronous(asked: bool | str, state: TrainState) -> tuple[bool, str]:
    """`checkpoint.async` with auto resolved, and the reason as a sentence. A collective call."""
    if asked != AUTO:
        return bool(asked), f"checkpoint.async={str(asked).lower()}"
    world = state.world
    needed, free = staged_bytes(state) * world.local_size, available_memory()
    fits = free is None or needed <= MOST * free
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
