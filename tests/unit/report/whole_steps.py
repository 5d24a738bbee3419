"""Counts the memory of whole training steps: in any layout of FSDP2, on fake tensors and ranks that are not there."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.distributed import layouts
from ngpt_train.distributed.world import World
from ngpt_train.models import Decoder
from ngpt_train.models.rank_rows import local_rows
from ngpt_train.report.counting import MemoryCounter, counting
from ngpt_train.training import build_state, train_step

LAYOUTS = {"single": (1, 1), "fsdp": (8, 8), "hsdp": (8, 4)}  # ranks, of a host


def config_of(
    model: str, layout: str, recompute: str, *options: str, micro_batches: int = 2, layers: int = 3
) -> Config:
    ranks, local_size = LAYOUTS.get(layout, (1, 1))
    return load_config(
        [
            *f"model={model}".split(),
            *("scale=debug", "model.d_model=256", "model.n_heads=4", f"model.n_layers={layers}", "model.context=256"),
            *("model.vocab_size=2000", "train.device=cpu", "train.compile=false", f"parallel={layout}"),
            *("train.micro_rows=4", f"train.batch_rows={4 * ranks * micro_batches}"),
            *(f"train.activation_checkpointing={recompute}", "optim.lr=1e-3"),
            *(f"plan.world_size={ranks}", f"plan.ranks_per_host={local_size}"),
            "checkpoint.async=false",  # whose copies to save lie in the same memory on a CPU, beside the steps
            *([f"parallel.shard={local_size}"] if layout == "hsdp" else []),
            *options,
        ],
        world_size=ranks,
    )


def counted_peak(config: Config, ranks: int, local_size: int) -> int:
    """The most bytes of tensors that rank 0 holds in the second of two steps, under FSDP2 or on a single device."""
    kind, world = config.parallel.kind, World(0, ranks, 0, torch.device("cpu"), local_size)
    with ExitStack() as stack:
        if kind != "single":
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            shape = (ranks,) if kind == "fsdp" else (ranks // local_size, local_size)
            names = ("shard",) if kind == "fsdp" else ("replicate", "shard")
            # Torch looks into a mesh's numbers, so it is made beforehand.
            mesh = layouts.init_device_mesh("cpu", shape, mesh_dim_names=names)
            stack.enter_context(patch.object(layouts, "init_device_mesh", lambda *_, **__: mesh))
            # Ranks that are not there cannot say how many ranks their hosts have.
            stack.enter_context(patch.object(layouts, "check_hosts", lambda world: None))
            # Fake tensors cannot be moved from the meta device.
            stack.enter_context(patch.object(layouts, "build_model", on_cpu(layouts.build_model)))
            stack.enter_context(patch.object(Decoder, "to_empty", lambda model, device: model))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return peak_of_steps(config, world)


def peak_of_steps(config: Config, world: World) -> int:
    """As `counted_peak`, for a process group that is there."""
    state = build_state(config, world)
    n, T = config.train.rows_per_step // (state.micro_rows * world.size), config.model.context
    tokens = [torch.zeros(state.micro_rows, T, dtype=torch.long) for _ in range(n)]
    counter = MemoryCounter()
    with counting(counter):
        for tensor in (*state.model.parameters(), *state.model.buffers()):
            counter.note(local_rows(tensor))
        for _ in range(2):
            counter.peak = counter.now
            train_step(state, [(rows, rows) for rows in tokens], untouched=True)
    return counter.peak


def on_cpu(build: Callable[..., Decoder]) -> Callable[..., Decoder]:
    def built(*arguments: Any) -> Decoder:
        with torch.device("cpu"):
            return build(*arguments)

    return built
