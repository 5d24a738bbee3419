"""Times the optimizer steps of GPT and of the config's model (or nGPT), in turn in one process, on random tokens.
With a matrix optimizer, such as optim.name=muon, these are the config's model with AdamW and with that optimizer; with
optim.gate_power or optim.angle_cap without them and with them.

    python -m benchmarks.step [GROUP=OPTION ...] [KEY=VALUE ...] [--out FILE]

A step is forward, backward, clipping, optimizer and projection.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.common import Entry, elapsed, interleaved, main, peak_memory_gb, utilization
from ngpt_train.config import Config, load_config
from ngpt_train.study.random_steps import steps_of, tokens_of, with_vocabulary
from ngpt_train.training import TrainState, build_state
from ngpt_train.training.step import dropout_seeds

ROUNDS = 10
WARM_UP = 3


def bench(overrides: Sequence[str]) -> Iterator[Entry]:
    """An entry for each of two configs. Both have the same batch and context; the ratio is to the first one's time."""
    states = {name: build_state(with_vocabulary(config)) for name, config in configs(overrides).items()}
    first = next(iter(states))
    runs = {name: steps_of(state) for name, state in states.items()}
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    for entry in interleaved(runs, first, ROUNDS, "tokens", elapsed(states[first].world.device)):
        state = states[entry.name]
        device = state.world.device
        assert entry.rate is not None
        more = {
            "mfu": utilization(state.model, entry.rate, device),
            "activations_mb": saved_activations(state) / 1e6,
            "memory_gb": peak_memory_gb(runs[entry.name], device),
        }
        yield replace(entry, more=more)


def configs(overrides: Sequence[str]) -> dict[str, Config]:
    """The two, by a name."""
    config = load_config(overrides, world_size=1)
    optim = config.optim
    plain = replace(optim, name="adamw" if optim.matrix_step else optim.name, gate_power=None, angle_cap=None)
    if plain != optim:
        switches = {"gate": optim.gate_power, "cap": optim.angle_cap}
        said = " ".join([optim.name, *(name for name, value in switches.items() if value is not None)])
        return {
            f"{config.model.name} {plain.name}": replace(config, optim=plain),
            f"{config.model.name} {said}": config,
        }
    others = [override for override in overrides if not override.startswith("model=")]
    names = ("gpt", config.model.name if config.model.name != "gpt" else "ngpt")
    return {name: load_config([*others, f"model={name}"], world_size=1) for name in names}


def saved_activations(state: TrainState) -> int:
    """Bytes that the forward pass of one micro batch keeps for the backward pass, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in state.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        batch = tokens_of(state)[0]
        (seeds,) = dropout_seeds(state, [len(batch[0])])
        loss = state.forward(*batch, **seeds).total
    loss.backward()
    state.optimizer.zero_grad(set_to_none=True)
    return sum(kept.values())


if __name__ == "__main__":
    sys.exit(main(__doc__, bench))
