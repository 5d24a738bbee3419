"""What the ranks of a run tell each other in a training step, counted call by call, in each layout.

    torchrun --nproc-per-node 4 -m benchmarks.communication [GROUP=OPTION ...] [KEY=VALUE ...] [--out FILE]

Counted are torch's own calls of the backend, with the tensors that they are given. What of it a rank sends follows from
the algorithm, here rings, which NCCL and gloo use for large tensors: a tensor of n ranks travels in n parts, of which a
rank sends n - 1, and an all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import main
from ngpt_train.config import ConfigError, load_config
from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.distributed.world import World, join_world
from ngpt_train.study.random_steps import tokens_of, with_vocabulary
from ngpt_train.training import build_state, train_step

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
# torch's names, and which of their arguments is the whole tensor.
_CALLS = {
    "c10d::allreduce_": (ALL_REDUCE, 0),
    "c10d::_allgather_base_": (ALL_GATHER, 0),
    "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, 1),
}
# Of DTensor, as matrix optimizers gather and add up. The result is the whole tensor.
_OF_DTENSOR = {
    "_c10d_functional::all_reduce": ALL_REDUCE,
    "_c10d_functional::all_gather_into_tensor": ALL_GATHER,
}
_SILENT = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
MICRO_BATCHES = (1, 4)


@dataclass(frozen=True)
class Collective:
    """One call, or several of a kind. bytes: of the whole tensor that ranks sum, put together or take apart."""

    kind: str
    ranks: int  # of its group
    bytes: int
    calls: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, in a ring."""
        return (2 if self.kind == ALL_REDUCE else 1) * (self.ranks - 1) / self.ranks * self.bytes


class Collectives(TorchDispatchMode):
    """Notes every collective of this rank inside, in order, those of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first, whose collectives then come here
        if function._schema.name in _OF_DTENSOR:
            result = function(*args, **(kwargs or {}))
            kind, group = _OF_DTENSOR[function._schema.name], _resolve_process_group(args[-1])
            self.found.append(Collective(kind, group.size(), result.nbytes))
            return result
        if "c10d" in function.namespace and function._schema.name not in _SILENT:
            name = function._schema.name
            assert name in _CALLS, f"a collective that is not counted: {name}"
            kind, whole = _CALLS[name]
            tensors = args[whole] if isinstance(args[whole], list) else [args[whole]]
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            self.found.append(Collective(kind, group.size(), sum(tensor.nbytes for tensor in tensors)))
        return function(*args, **(kwargs or {}))

    def by_kind(self) -> list[Collective]:
        """The sums over calls of a kind and a size of group."""
        kinds = dict.fromkeys((x.kind, x.ranks) for x in self.found)
        same = {key: [x for x in self.found if (x.kind, x.ranks) == key] for key in kinds}
        return [Collective(*key, sum(x.bytes for x in calls), len(calls)) for key, calls in same.items()]


@dataclass(frozen=True)
class Communication:
    """A step of one rank in one layout. written: bytes that the process wrote during the step, by Linux's count, which
    with gloo is what it sent through its sockets; None on GPUs."""

    layout: str
    micro_batches: int
    collectives: list[Collective]
    written: int | None

    @property
    def sent(self) -> float:
        return sum(x.sent for x in self.collectives)

    def json(self) -> dict[str, Any]:
        """All numbers by name."""
        return asdict(self) | {"sent": self.sent}

    def line(self) -> str:
        """A line for each kind of collective, and the sum."""
        lines = []
        for x in self.collectives:
            size, sent = f"{x.bytes / 1e6:.3f}", f"{x.sent / 1e6:.3f}"
            lines.append(row_of(self.layout, self.micro_batches, x.kind, x.ranks, x.calls, size, sent))
        calls, sent = sum(x.calls for x in self.collectives), f"{self.sent / 1e6:.3f}"
        written = "" if self.written is None else f", {self.written / 1e6:.3f} written"
        return "\n".join([*lines, row_of(self.layout, self.micro_batches, "in all", "", calls, "", sent) + written])


def row_of(layout: str, n: Any, kind: str, ranks: Any, calls: Any, size: str, sent: str) -> str:
    return f"{layout:<46} {n:>13}  {kind:<14} {ranks:>5} {calls:>5} {size:>9} {sent:>9}"


def layouts(config: Config, n_ranks: int) -> dict[str, Config]:
    """`config` in each layout for so many ranks, by what the user would write. HSDP has groups of parallel.shard ranks,
    with `auto` of half of the ranks."""
    shard = n_ranks // 2 if config.parallel.shard == AUTO else int(config.parallel.shard)
    sparing = {"gather": "step", "scatter": "step"}
    keys: list[dict[str, Any]] = [
        {"kind": "ddp"},
        {"kind": "fsdp"},
        {"kind": "fsdp", "gather": "micro_batch"},
        {"kind": "fsdp", "scatter": "step"},
        {"kind": "fsdp", **sparing},
    ]
    if 1 < shard < n_ranks and n_ranks % shard == 0:
        keys += [{"kind": "hsdp", "shard": shard, **more} for more in ({}, sparing)]
    return {
        " ".join([f"parallel={of['kind']}", *(f"{key}={of[key]}" for key in of if key != "kind")]): replace(
            config, parallel=replace(config.parallel, **of)
        )
        for of in keys
    }


def bench(overrides: Sequence[str]) -> Iterator[Communication]:
    """The second of two steps in each layout, with 1 and with 4 micro batches of train.micro_rows rows; a collective
    call.

    Raises ConfigError on one rank.
    """
    config = with_vocabulary(load_config(overrides, world_size=1))
    micro_rows = 1 if config.train.micro_rows == AUTO else int(config.train.micro_rows)
    world = join_world(config)
    if world.size == 1:
        raise ConfigError(
            "one rank tells nobody anything\n"
            "  For example torchrun --standalone --nproc-per-node 4 -m benchmarks.communication"
        )
    for name, laid_out in layouts(config, world.size).items():
        for n in MICRO_BATCHES:
            rows = micro_rows * world.size * n
            train = replace(laid_out.train, batch_rows=rows, batch_tokens=None, micro_rows=micro_rows)
            yield of_a_step(name, replace(laid_out, train=train), world, n)
            gc.collect()


def of_a_step(name: str, config: Config, world: World, n_micro_batches: int) -> Communication:
    """What this rank tells the others in the second step: in the first, DDP and FSDP2 still arrange themselves."""
    state = build_state(config, world)
    micro_batches = tokens_of(state)
    assert len(micro_batches) == n_micro_batches
    train_step(state, micro_batches)
    counter, before = Collectives(), _written()
    with counter:
        train_step(state, micro_batches)
    after = _written()
    written = None
    if world.device.type == "cpu" and before is not None and after is not None:  # NCCL writes to no file
        written = after - before
    return Communication(name, n_micro_batches, counter.by_kind(), written)


def _written() -> int | None:
    if sys.platform != "linux":
        return None
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "wchar" in line)


if __name__ == "__main__":
    head = row_of("layout", "micro batches", "collective", "ranks", "calls", "MB", "MB sent")
    code = main(__doc__, bench, head)
    sys.stdout.flush()
    # Not by way of the interpreter's end, which gloo's threads may hang or abort: see distributed/world.py.
    os._exit(code)
