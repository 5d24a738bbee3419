"""Optimizer steps on random tokens, for timing. They need no data and no tokenizer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED
from ngpt_train.training.state import TrainState
from ngpt_train.training.step import train_step

VOCAB_SIZE = 32_000  # the paper's


def with_vocabulary(config: Config) -> Config:
    """`config` with VOCAB_SIZE for model.vocab_size=auto, because there is no tokenizer."""
    size = VOCAB_SIZE if config.model.vocab_size == AUTO else config.model.vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))


def tokens_of(state: TrainState) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro batches of a step: random tokens and targets, each `(micro_rows, context)`, on its device. A
    row has as many targets as the model's objective has at most."""
    config, world = state.config, state.world
    model = config.model
    generator = torch.Generator().manual_seed(world.rank)
    n_micro = config.train.rows_per_step // (state.micro_rows * world.size)
    shape = (2, n_micro, state.micro_rows, model.context)
    tokens, targets = torch.randint(int(model.vocab_size), shape, generator=generator).to(world.device)
    targets = targets % (model.n_classes or int(model.vocab_size))
    targets[..., : model.context - model.predicted(model.context)] = IGNORED
    return list(zip(tokens, targets, strict=True))


def steps_of(state: TrainState) -> Callable[[], float]:
    """A function that takes one step, always on the same tokens, and returns the step's tokens over all ranks."""
    micro_batches = tokens_of(state)

    def run() -> float:
        result = train_step(state, micro_batches, untouched=True)
        return float(result.n_tokens)  # reading the number waits for the device

    return run
