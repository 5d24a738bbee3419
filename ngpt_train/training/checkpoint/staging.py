"""Copies of a state in memory, from which a checkpoint is written while training changes the state."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ngpt_train.config.keys import AUTO
from ngpt_train.training.checkpoint.files import gb
from ngpt_train.training.checkpoint.pieces import Piece, Place
from ngpt_train.training.state import TrainState

MOST = 0.5  # of a host's free memory that the copies may take: data workers and the system need some, too


class Staging:
    """Buffers for the pieces that this rank writes, in the host's memory, used again for each checkpoint.

    On a GPU they are pinned, and a stream of its own fills them. The host waits for nothing; the next step of the
    optimizer, which would overwrite what is not copied yet, waits on the device.
    """

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self._buffers: dict[Place, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        if self._stream is not None:
            optimizer.register_step_pre_hook(lambda *_: self._hold_back_the_device())

    def copy(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """The same pieces in the buffers. They may be read after `wait`, and until the next call. Raises RuntimeError
        where there is no memory."""
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
            rows.record_stream(self._stream)  # some are temporary, and their memory must not be used again too early
        return replace(piece, rows=buffer.copy_(rows, non_blocking=True))

    def _hold_back_the_device(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)


def staged_bytes(state: TrainState) -> int:
    """About what the copies of this rank take: its share of the weights, Adam's two moments and the moving average."""
    parts = 3 if state.ema is None else 4
    return (
        parts * sum(weight.numel() * weight.element_size() for weight in state.model.parameters()) // state.world.size
    )


def resolve_asynchronous(asked: bool | str, state: TrainState) -> tuple[bool, str]:
    """`checkpoint.async` with auto resolved, and why, in words. A collective call."""
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
    """Bytes of memory that this process could still take, by the machine and by its control group; None: not known."""
    found = []
    meminfo = _read("/proc/meminfo")
    if "MemAvailable:" in meminfo:
        found.append(1024 * int(meminfo.partition("MemAvailable:")[2].split()[0]))
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        found.append(int(limit) - int(used))
    return min(found) if found else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
