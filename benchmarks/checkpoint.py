"""Times saving and loading a checkpoint, beside torch.save and torch.load of the same tensors, and how long training
waits for a save.

    python -m benchmarks.checkpoint [GROUP=OPTION ...] [KEY=VALUE ...] [--out FILE]

Our checkpoints are synced to the disk and have a checksum of every file, which is verified before loading. torch.save
leaves its file in the operating system's buffers; "torch.save, synced" waits for the disk as ours does. Times are
wall-clock times, because waiting for a disk takes no CPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.common import WALL, Entry, Run, interleaved, main
from ngpt_train.config import load_config
from ngpt_train.core.files import sync
from ngpt_train.study.random_steps import steps_of, with_vocabulary
from ngpt_train.training import TrainState, build_state
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.hooks.saving import Saves

ROUNDS = 5
STEPS = 4  # during which a save beside training is written


def bench(overrides: Sequence[str]) -> Iterator[Entry]:
    """Entries of saving and of loading the state after one step, which has Adam's moments, with rates in bytes/s, and
    of how long training waits, in times of a step."""
    config = load_config(overrides, world_size=1)
    state = build_state(with_vocabulary(config))
    step = steps_of(state)
    step()
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory), state.world, 1, None, config.checkpoint.checksum)
        beside = Path(directory, "beside.pt")
        tensors = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
        size = float(sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)))

        def save() -> Path:
            return saved(checkpoints, state)

        def save_synced() -> None:
            torch.save(tensors, beside)
            sync(beside)

        def load() -> None:
            load_state(Path(directory, f"step_{state.step:08d}"), state)

        def load_beside() -> None:
            read = torch.load(beside, map_location=state.world.device)
            state.model.load_state_dict(read["model"])
            state.optimizer.load_state_dict(read["optimizer"])

        saving = {"ours": save, "torch.save": lambda: torch.save(tensors, beside), "torch.save, synced": save_synced}
        runs = {name: returning(size, function) for name, function in saving.items()}
        yield from interleaved(runs, "torch.save", ROUNDS, "bytes", WALL, "checkpoint, save: ")
        runs = {"ours": returning(size, load), "torch.load": returning(size, load_beside)}
        yield from interleaved(runs, "torch.load", ROUNDS, "bytes", WALL, "checkpoint, load: ")
        yield from cost_for_training(state, step, checkpoints)


def saved(checkpoints: Checkpoints, state: TrainState) -> Path:
    """The checkpoint of a save that training waits for."""
    return checkpoints.write(checkpoints.snapshot(state, {}, lambda _: None, None), state.world)


def cost_for_training(state: TrainState, step: Run, checkpoints: Checkpoints) -> Iterator[Entry]:
    """How long a step waits for a save, and how much longer STEPS steps take with a save in them."""
    with_async = replace(state.config.checkpoint, asynchronous=True)
    in_background = replace(state, config=replace(state.config, checkpoint=with_async))
    saves = Saves(checkpoints, in_background, lambda _: None, lambda _: None)

    def wait() -> None:
        saved(checkpoints, state)

    def begin() -> None:
        saves.save(state, {}, lambda _: None, None)

    def until_it_returns(run: Run) -> tuple[float, float]:
        found = WALL(run)
        saves.settle()
        return found

    stalls = {"a step": step, "training waits": wait, "beside training": begin}
    runs = {name: returning(1, function) for name, function in stalls.items()}
    yield from interleaved(runs, "a step", ROUNDS, "times", until_it_returns, "checkpoint, stall: ")

    def steps_with(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            function()
            for _ in range(STEPS):
                step()
            saves.settle()

        return run

    base = f"{STEPS} steps"
    whole = {base: lambda: None, f"{base}, training waits": wait, f"{base}, beside training": begin}
    runs = {name: returning(STEPS, steps_with(function)) for name, function in whole.items()}
    yield from interleaved(runs, base, ROUNDS, "steps", WALL, "checkpoint, and training: ")


def returning(size: float, function: Callable[[], object]) -> Run:
    """`function` as a run of `size` units."""

    def run() -> float:
        function()
        return size

    return run


if __name__ == "__main__":
    sys.exit(main(__doc__, bench))
