"""The training state: model, optimizer, counters and sums, which a training step changes."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ngpt_train.distributed.first_contact import first_contact
from ngpt_train.distributed.layouts import mesh_of_replicas, parallelize
from ngpt_train.distributed.world import join_world
from ngpt_train.optim.loss_scale import LossScale
from ngpt_train.optim.moving_average import MovingAverage
from ngpt_train.optim.optimizer import build_optimizer, lr_factors, round_to_bf16_
from ngpt_train.training.feed import resolve_micro_rows
from ngpt_train.training.guards import Guards, explain_out_of_memory

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config
    from ngpt_train.distributed.world import World
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.optim.fused_adam import FusedAdam
    from ngpt_train.training.step import StepResult


class Interval:
    """Sums since the last train record: the loss, targets, steps, skipped steps and clipped steps. They are on the
    device, so that no step waits for them.

    clip_norm: gradients with a larger norm are clipped; None: no gradient is clipped. A checkpoint holds the sums, so
    that the first record after a resume is the same as without the interruption.
    """

    def __init__(self, device: torch.device, clip_norm: float | None) -> None:
        self._clip_norm = clip_norm
        dtypes = {"loss_sum": torch.float64} | dict.fromkeys(("n_targets", "n_skipped", "n_clipped"), torch.int64)
        self._sums = {name: torch.zeros((), dtype=dtype, device=device) for name, dtype in dtypes.items()}
        self._n_steps = 0

    def add(self, result: StepResult) -> None:
        """Adds a step. A skipped step, whose loss may be NaN, adds to the skipped steps alone."""
        self._sums["loss_sum"] += result.loss_sum.masked_fill(result.skipped, 0.0)
        self._sums["n_targets"] += result.n_tokens.masked_fill(result.skipped, 0)
        self._sums["n_skipped"] += result.skipped
        self._n_steps += 1
        if self._clip_norm is not None:
            self._sums["n_clipped"] += (result.grad_norm > self._clip_norm) & ~result.skipped

    def read(self) -> dict[str, float | None]:
        """The fields of a train record. Waits for the device. loss_mean: mean cross-entropy in nats over all targets,
        without skipped steps; NaN if there are no targets. Every target has the same weight, as in the loss of a step.
        clipped: clipped steps / steps; None without clipping. Skipped steps do not count as clipped."""
        sums = {name: value.item() for name, value in self._sums.items()}
        counts = self._clip_norm is not None and self._n_steps
        return {
            "loss_mean": sums["loss_sum"] / sums["n_targets"] if sums["n_targets"] else math.nan,
            "skipped": int(sums["n_skipped"]),
            "clipped": sums["n_clipped"] / self._n_steps if counts else None,
        }

    def reset(self) -> None:
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """The sums as exact numbers for JSON."""
        return {**{name: value.item() for name, value in self._sums.items()}, "n_steps": self._n_steps}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """stored: from `state_dict`. Earlier versions had no counts: their share covers the steps since the resume."""
        for name, value in self._sums.items():
            value.fill_(stored.get(name, 0))
        self._n_steps = stored.get("n_steps", 0)


@dataclass
class TrainState:
    """Model, optimizer and counters on this rank."""

    config: Config
    world: World
    model: Decoder
    forward: nn.Module  # a training step calls it: the model, or DDP around the model
    optimizer: FusedAdam
    lr_factors: list[float]  # one for each group of the optimizer: its rate / the rate of the step
    micro_rows: int  # rows per rank in one forward pass
    step: int  # optimizer steps completed
    tokens: Tensor  # valid targets so far, over all ranks; 0-dim int64 on the device
    interval: Interval  # sums since the last train record
    guards: Guards
    loss_scale: LossScale | None = None  # with train.precision=fp16
    ema: MovingAverage | None = None  # of the weights, with optim.ema_decay
    train_seconds: float = 0.0  # in training steps so far
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # as run.json has them

    def counters(self) -> dict[str, Any]:
        """The numbers of a checkpoint beside its tensors, exact in JSON. Waits for the device."""
        return {
            "step": self.step,
            "tokens": int(self.tokens),
            "train_seconds": self.train_seconds,
            "interval": self.interval.state_dict(),
            "guards": self.guards.state_dict(),
            "rollbacks": self.rollbacks,
            **({} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}),
        }

    def load_counters(self, stored: Mapping[str, Any]) -> None:
        """stored: `counters` of a checkpoint. The first ones of this format had no guards and rollbacks."""
        self.step = stored["step"]
        self.tokens.fill_(stored["tokens"])
        self.train_seconds = stored["train_seconds"]
        self.interval.load_state_dict(stored["interval"])
        self.guards.load_state_dict(stored.get("guards", {}))
        self.rollbacks = stored.get("rollbacks", [])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(stored["loss_scale"])


def check_kernels(config: Config, world: World, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Checks the kernels of a run, and switches off the kernels that must not run; a collective call, before
    `build_state`.

    stored: the run's last check in run.json; its choices by speed stay. Returns {"kernels": ...} for the entry of this
    start in run.json; empty without a GPU. Raises ConfigError where a kernel must not run but the config names it.
    """
    contact = first_contact(config, world, resolve_micro_rows(config, world.size), stored)
    return {} if contact is None else {"kernels": vars(contact)}


def build_state(config: Config, world: World | None = None) -> TrainState:
    """The state at step 0. Without `world` it joins the current process group, or torchrun's if there is none yet.
    Raises ConfigError if the config does not fit the ranks or the devices, or if vocab_size is `auto`."""
    world = world or join_world(config)
    if world.device.type == "cpu":
        keep_freed_memory()
    micro_rows = resolve_micro_rows(config, world.size)
    with explain_out_of_memory(micro_rows):
        model, forward = parallelize(config, world, micro_rows)
    groups = model.parameter_groups(by_kind=bool(config.optim.groups.chosen()))
    mesh = mesh_of_replicas(forward, world) if config.optim.matrix_step else None
    optimizer = build_optimizer(model, groups, config.optim, mesh)
    if config.optim.storage == "bf16":
        round_to_bf16_(model)
    decay = config.optim.ema_decay
    tokens = torch.zeros((), dtype=torch.int64, device=world.device)
    return TrainState(
        config,
        world,
        model,
        forward,
        optimizer,
        lr_factors(groups, config),
        micro_rows,
        step=0,
        tokens=tokens,
        interval=Interval(world.device, config.optim.clip_norm),
        guards=Guards(config.guards, world.device),
        loss_scale=LossScale(world.device) if model.compute_dtype == torch.float16 else None,
        ema=None if decay is None else MovingAverage(model.named_parameters(), decay),
    )


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory for this process, which takes the same blocks again in the next step.
    Otherwise the large blocks go back to the system, which clears every page anew: 6 to 9 % of the CPU time of a
    compiled step in bf16 (docs/benchmarks/step.md). Nothing changes without glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc.mallopt(m_trim_threshold, -1)  # never
        libc.mallopt(m_mmap_max, 0)  # no block has a mapping of its own
