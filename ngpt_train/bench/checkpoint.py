"""What saving and loading a checkpoint costs, beside torch.save and torch.load of the same tensors.

Ours writes through to the disk, with a checksum of every file, and reads them again before it loads; torch.save leaves
what it wrote to the operating system. Times are of the wall clock: a disk is waited for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ngpt_train.bench.interleaved import Entry, interleaved
from ngpt_train.bench.step import steps_of, with_vocabulary
from ngpt_train.config.schema import Config
from ngpt_train.training import build_state
from ngpt_train.training.checkpoint import Checkpoints, load_state

ROUNDS = 5
SAVE, LOAD = "checkpoint, save", "checkpoint, load"


def bench(config: Config, rounds: int = ROUNDS) -> Iterator[Entry]:
    """Entries of a state after one step, so that moments are there; rates count the tensors' bytes."""
    state = build_state(with_vocabulary(config))
    steps_of(state)()
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory), state.world, keep_last=1, keep_every=None)
        beside = Path(directory, "beside.pt")
        tensors = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
        size = float(sum(tensor.nbytes for tensor in tensors_in(tensors)))

        def saved() -> Path:
            return checkpoints.save(state, {}, lambda _: None)

        def load() -> None:
            load_state(Path(directory, f"step_{state.step:08d}"), state)

        def load_beside() -> None:
            read = torch.load(beside, map_location=state.world.device)
            state.model.load_state_dict(read["model"])
            state.optimizer.load_state_dict(read["optimizer"])

        saving = {"ours": counting(saved, size), "torch.save": counting(lambda: torch.save(tensors, beside), size)}
        yield from named(SAVE, interleaved(saving, "torch.save", rounds, "bytes"))
        loading = {"ours": counting(load, size), "torch.load": counting(load_beside, size)}
        yield from named(LOAD, interleaved(loading, "torch.load", rounds, "bytes"))


def counting(function: Callable[[], object], size: float) -> Callable[[], float]:
    def run() -> float:
        function()
        return size

    return run


def named(what: str, entries: list[Entry]) -> Iterator[Entry]:
    for entry in entries:
        yield replace(entry, name=f"{what}: {entry.name}", relative_to=f"{what}: {entry.relative_to}")


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
