"""Times the optimizer steps of two architectures, in turn in one process, on random tokens.

A step is forward, backward, clipping, optimizer and projection. On a GPU its time is wall-clock time until the device
has finished; on a CPU it is the process's CPU time, because other processes disturb wall-clock time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ngpt_train.bench.interleaved import Entry, by, interleaved
from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.observe.meters import Meter
from ngpt_train.training import TrainState, build_state, train_step
from ngpt_train.training.step import dropout_seeds

ROUNDS = 10
VOCAB_SIZE = 32_000  # the paper's
WARM_UP = 3


def bench(configs: Mapping[str, Config]) -> Iterator[Entry]:
    """One entry for each config, compared with the first; it needs no data.

    The configs have the same batch and context.
    """
    states = {name: build_state(with_vocabulary(config)) for name, config in configs.items()}
    runs = {name: steps_of(state) for name, state in states.items()}
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    on_cpu = next(iter(states.values())).world.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    first = next(iter(configs))
    for entry in interleaved(runs, first, ROUNDS, "tokens", by(clock)):
        state = states[entry.name]
        activations = saved_activations(state) / 1e6
        yield replace(entry, mfu=mfu(state, entry), activations_mb=activations, memory_gb=peak_memory(runs[entry.name]))


def with_vocabulary(config: Config) -> Config:
    """`config` with VOCAB_SIZE where model.vocab_size is auto, because a benchmark has no tokenizer to ask."""
    size = VOCAB_SIZE if config.model.vocab_size == AUTO else config.model.vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))


def tokens_of(state: TrainState) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro batches of a step: random tokens and targets, each `(micro_rows, context)`, on its device."""
    config, world = state.config, state.world
    vocab_size = int(config.model.vocab_size)
    generator = torch.Generator().manual_seed(world.rank)
    n_micro = config.train.rows_per_step // (state.micro_rows * world.size)
    rows = torch.randint(vocab_size, (n_micro, state.micro_rows, config.model.context + 1), generator=generator)
    rows = rows.to(world.device)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def steps_of(state: TrainState) -> Callable[[], float]:
    """A run that takes one step, on the same tokens each time, and returns the step's tokens over all ranks."""
    micro_batches = tokens_of(state)

    def run() -> float:
        result = train_step(state, micro_batches, untouched=True)
        return float(result.n_tokens)  # reading the number waits for the device

    return run


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


def mfu(state: TrainState, entry: Entry) -> float | None:
    """Model FLOPs utilization, 0 to 1, by PaLM's count: (6 weights + 12 L d_model T) tokens/s over the devices' peak.

    None where the peak is not known.
    """
    config = state.config
    flops = state.model.flops_per_token(config.model.context)
    dtype = state.model.compute_dtype or torch.float32
    peak = Meter(flops, state.world.size, state.world.device, dtype).peak
    return None if peak is None or entry.rate is None else flops * entry.rate / peak


def peak_memory(run: Callable[[], float]) -> float | None:
    """The most GB of tensors on the GPU during `run`, weights of all architectures included; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 1e9
