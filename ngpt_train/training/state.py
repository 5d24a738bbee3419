"""Everything that a training step changes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ngpt_train.config.schema import Config
from ngpt_train.distributed import World, join_world, parallelize
from ngpt_train.models import Decoder
from ngpt_train.optim import build_optimizer
from ngpt_train.training.batch import resolve_micro_rows
from ngpt_train.training.guards import explain_out_of_memory
from ngpt_train.training.interval import Interval


@dataclass
class TrainState:
    """Model, optimizer and how far they are, on this rank."""

    config: Config
    world: World
    model: Decoder
    forward: nn.Module  # what a step calls: the model, or DDP around it
    optimizer: torch.optim.Optimizer
    micro_rows: int  # rows per rank in one forward pass
    step: int  # optimizer steps completed
    tokens: Tensor  # targets that counted so far, over all ranks; 0-dim int64 on the device
    interval: Interval  # the steps since the last train record


def build_state(config: Config, world: World | None = None) -> TrainState:
    """The state at step 0 of `config` for the current process group (torchrun's, if none exists yet).

    Raises ConfigError for what does not fit the world: its size, its devices, or a vocab_size
    that is still `auto`.
    """
    world = world or join_world(config)
    micro_rows = resolve_micro_rows(
        config.train.rows_per_step, config.train.micro_rows, config.model.context, world.size
    )
    with explain_out_of_memory(micro_rows):
        model, forward = parallelize(config, world, micro_rows)
    optimizer = build_optimizer(model, model.parameter_groups(), config.optim)
    tokens = torch.zeros((), dtype=torch.int64, device=world.device)
    return TrainState(
        config, world, model, forward, optimizer, micro_rows, step=0, tokens=tokens, interval=Interval(world.device)
    )
