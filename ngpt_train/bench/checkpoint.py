"""Times saving and loading a checkpoint, beside torch.save and torch.load of the same tensors.

Our checkpoints are synced to the disk and have a checksum of every file, which is verified before loading. torch.save
leaves its file in the operating system's buffers. Times are wall-clock times, because waiting for a disk takes no CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ngpt_train.bench.interleaved import Entry, Run, interleaved
from ngpt_train.bench.step import steps_of, with_vocabulary
from ngpt_train.config.schema import Config
from ngpt_train.training import build_state
from ngpt_train.training.checkpoint import Checkpoints, load_state

ROUNDS = 5
SAVE, LOAD = "checkpoint, save", "checkpoint, load"


def bench(config: Config, rounds: int = ROUNDS) -> Iterator[Entry]:
    """Entries of saving and of loading the state after one step, which has Adam's moments; rates are in bytes/s."""
    state = build_state(with_vocabulary(config))
    steps_of(state)()
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory), state.world, keep_last=1, keep_every=None)
        beside = Path(directory, "beside.pt")
        tensors = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
        size = float(sum(tensor.nbytes for tensor in tensors_in(tensors)))

        def save() -> Path:
            return checkpoints.save(state, {}, lambda _: None)

        def load() -> None:
            load_state(Path(directory, f"step_{state.step:08d}"), state)

        def load_beside() -> None:
            read = torch.load(beside, map_location=state.world.device)
            state.model.load_state_dict(read["model"])
            state.optimizer.load_state_dict(read["optimizer"])

        saving = {"ours": returning(size, save), "torch.save": returning(size, lambda: torch.save(tensors, beside))}
        yield from with_prefix(SAVE, interleaved(saving, "torch.save", rounds, "bytes"))
        loading = {"ours": returning(size, load), "torch.load": returning(size, load_beside)}
        yield from with_prefix(LOAD, interleaved(loading, "torch.load", rounds, "bytes"))


def returning(size: float, function: Callable[[], object]) -> Run:
    """`function` as a run of `size` units."""

    def run() -> float:
        function()
        return size

    return run


def with_prefix(what: str, entries: list[Entry]) -> Iterator[Entry]:
    """The entries with "WHAT: " before their names."""
    for entry in entries:
        yield replace(entry, name=f"{what}: {entry.name}", relative_to=f"{what}: {entry.relative_to}")


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the values of nested dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
