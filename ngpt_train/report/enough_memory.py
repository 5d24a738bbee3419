"""Refuses a model that this machine cannot hold, before memory is taken for it: by weights, gradients and moments, or
weights alone, the least that a step needs. `plan` estimates the rest."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ngpt_train.config.keys import AUTO
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.distributed.layouts import resolve_kind
from ngpt_train.distributed.world import World
from ngpt_train.models import build_model
from ngpt_train.models.decoder import Decoder
from ngpt_train.report.counting import depths_of, of_all_blocks
from ngpt_train.report.memory import state_items

GIB = 2**30


def check_state_fits(config: Config, world: World) -> None:
    """Raises ConfigError if weights, gradients, Adam's moments and the moving average take more than all memory of a
    rank's GPU, or, for all ranks of a host, of its CPUs. An unknown vocabulary counts as two ids."""
    kind = resolve_kind(config.parallel.kind, world.size, world.device.type, world.local_size)
    whole = {"fsdp": world.size, "hsdp": world.local_size if config.parallel.shard == AUTO else config.parallel.shard}
    n_shards = int(whole.get(kind, 0))

    def size(model: Decoder) -> int:
        return sum(item.bytes for item in state_items(model, n_shards, config.optim))

    ranks = 1 if world.device.type == "cuda" else world.local_size
    needed, there = ranks * without_memory(config.model, size), memory_of(world.device)
    if needed > there:
        names = ("d_model", *depths_of(config.model), "d_mlp", "vocab_size")
        sizes = ", ".join(f"model.{name}={getattr(config.model, name)}" for name in names)
        problem = f"{sizes}: weights, gradients and the optimizer's state take {needed / GIB:,.1f} GiB"
        fix = "Choose a smaller model, or more ranks with parallel=fsdp; `plan` shows the memory of a rank."
        raise ConfigError(f"{problem} {_where(world.device, ranks)}, which has {there / GIB:,.1f} GiB. {fix}")


def check_weights_fit(checkpoint: Path, model: ModelConfig, device: torch.device) -> None:
    """Raises ConfigError if the weights of a checkpoint's model take more than all memory of the device."""
    needed, there = without_memory(model, lambda made: 4 * made.n_params()), memory_of(device)
    if needed > there:
        where = f"{_where(device, 1)}, which has {there / GIB:,.1f} GiB. Choose a machine with more memory."
        raise ConfigError(
            f"train.device={device.type}: the weights of {checkpoint} take {needed / GIB:,.1f} GiB {where}"
        )


def memory_of(device: torch.device) -> int:
    """All memory of a GPU, or of this host or its container, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    of_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(of_host, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return of_host


def without_memory(model: ModelConfig, size: Callable[[Decoder], int]) -> float:
    """`size` of the whole model, from models of few blocks: building ten thousand takes a minute even on `meta`."""

    def count(few: ModelConfig) -> list[float]:
        with torch.device("meta"):
            return [size(build_model(few))]

    known = replace(model, vocab_size=2 if model.vocab_size == AUTO else model.vocab_size)
    return of_all_blocks(known, count)[0][0]


def _where(device: torch.device, ranks: int) -> str:
    on_host = "in the memory of this host" + f" for its {ranks} ranks" * (ranks > 1)
    return f"on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else on_host
