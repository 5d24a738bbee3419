"""The tensors of a training state under canonical names (docs/weights.md), in the shapes that the names promise.

A model stores several matrices in one parameter. Here each matrix is a view of its rows in the parameter, or, if the
parameter is sharded, of this rank's rows. Nothing is copied or gathered, and reading into a view fills the parameter.

    layers.0.wq                        a weight
    exp_avg.layers.0.wq                Adam's first moment of it; exp_avg_sq: the second; step: the number of steps
    ema.layers.0.wq                    its moving average
    statistics.layers.0.norm_attn.nu   a running statistic, of all ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ngpt_train.models.rank_rows import is_sharded, local_rows
from ngpt_train.models.weights import canonical, named_weights

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    from ngpt_train.distributed.world import World
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.training.state import TrainState

Tensors = Mapping[str, Mapping[str, Tensor]]  # tensors[kind][name]; kind: "model", a moment, "ema" or "statistics"


class RankRows(Tensor):
    """A sharded tensor of the shape `size`. This rank holds `rows`, from number `first` on; there may be none. It has
    the two methods of a DTensor that writing and reading a checkpoint need."""

    rows: Tensor
    first: int

    @staticmethod
    def __new__(cls, rows: Tensor, first: int, size: torch.Size) -> RankRows:
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=rows.dtype, device=rows.device)
        self.rows, self.first = rows, first
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{function}: of a RankRows this rank has `rows` alone")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = torch.Size((self.first, *(0 for _ in self.rows.shape[1:])))
        return [ChunkStorageMetadata(offsets, self.rows.shape)] if len(self.rows) else []

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.rows


def parts_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """parts[parameter][weight]: rows of each weight in each parameter of `model`, weights by canonical name."""
    pairs = zip(model.named_parameters(), named_weights(model), strict=True)
    return {name: {canonical(path): rows for path, rows in parts.items()} for (name, _), (_, parts) in pairs}


def held_tensors(state: TrainState) -> Tensors:
    """Weights and buffers, moments and moving averages: the memory of `state` itself, this rank's shards under FSDP2. A
    moment has the optimizer's name for it, such as `exp_avg`. There are none before the first step."""
    # Between a validation and the next step FSDP2 lends the model whole matrices. state_dict takes them back.
    weights: dict[str, Tensor] = state.model.state_dict(keep_vars=True)
    names: dict[Tensor, str] = {}
    for name, weight in weights.items():
        names.setdefault(weight, name)  # a shared one has the first of its names, as in `named_parameters`
    found = {"model": {name: weight.detach() for weight, name in names.items()}}
    for parameter, moments in state.optimizer.state.items():
        for moment, value in moments.items():
            found.setdefault(moment, {})[names[parameter]] = value
    return found if state.ema is None else found | {"ema": state.ema.weights}


def begin_moments_(optimizer: torch.optim.Optimizer) -> None:
    """Makes the moments, unless a step has made them: by a step with gradients of 0, at the rate before the first step,
    0. It may round the weights, so read them afterwards."""
    if not optimizer.state:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()


def by_canonical_name(model: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors under canonical names, cut into views where a parameter stacks several matrices."""
    parts = parts_of(model)
    found: dict[str, Tensor] = {}
    for kind, named in tensors.items():
        for name, value in named.items():
            stacked = {name: 1} if kind == "statistics" else parts.get(name, {canonical(name): 1})  # a buffer
            for part, rows in cut(value, stacked).items():
                found[part if kind == "model" else f"{kind}.{part}"] = rows
    return found


def cut(tensor: Tensor, parts: Mapping[str, int]) -> dict[str, Tensor]:
    """Cuts `tensor` into a view for each part. parts: rows by name, in order. A 0-dim tensor, such as a count of steps,
    goes to the first part; the others get copies."""
    if len(parts) == 1:
        return dict.fromkeys(parts, tensor)
    if tensor.ndim == 0:
        return {name: tensor if index == 0 else tensor.clone() for index, name in enumerate(parts)}
    if not is_sharded(tensor):
        return dict(zip(parts, tensor.split(list(parts.values())), strict=True))
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    first = chunk.offsets[0]  # of this rank's rows
    found: dict[str, Tensor] = {}
    begin = 0  # of the part
    for name, rows in parts.items():
        start, stop = max(begin, first), max(begin, first, min(begin + rows, first + len(local)))  # of mine
        size = torch.Size((rows, *tensor.shape[1:]))
        found[name] = RankRows(local[start - first : stop - first], start - begin, size)
        begin += rows
    return found


def statistics_of_all_ranks(model: Decoder, world: World) -> dict[str, Tensor]:
    """Each running statistic of all ranks, `(ranks, ...)`, on every rank. Ranks may differ, and on a resume each rank
    gets its own statistics back."""
    own = {name: value.cpu() for name, value in model.statistics().items()}
    ranks = world.gather(own) if own else []
    return {name: torch.stack([rank[name] for rank in ranks]) for name in own}


def empty_statistics(model: Decoder, n_ranks: int) -> dict[str, Tensor]:
    """Uninitialised tensors in the shapes of `statistics_of_all_ranks` on `n_ranks` ranks."""
    return {name: value.new_empty(n_ranks, *value.shape, device="cpu") for name, value in model.statistics().items()}


def set_statistics(model: Decoder, ranks: dict[str, Tensor], world: World) -> None:
    """Sets this rank's statistics: its own if the checkpoint has as many ranks, else the mean of all."""
    for name, value in model.statistics().items():
        same = len(ranks[name]) == world.size
        value.copy_(ranks[name][world.rank] if same else ranks[name].mean(0))


def with_names(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `held_tensors`, with names for people."""
    for kind, named in held_tensors(state).items():
        of = {"model": "", "ema": "the moving average of "}.get(kind, f"{kind} of ")
        yield from ((f"{of}{name}", tensor) for name, tensor in named.items())


def first_not_finite(state: TrainState) -> str | None:
    """The first weight, moment, average or running statistic of this rank with a NaN or an infinity; None if there is
    none. Waits for the device once."""
    with torch.no_grad():
        tensors = [(name, local_rows(tensor)) for name, tensor in with_names(state)]
        tensors += state.model.statistics().items()
        found = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]
        # A sum passes once over memory, and is finite only if all its terms are. Finite terms may overflow, too.
        sums = torch.stack([tensor.sum().float().to(state.world.device) for _, tensor in found]).tolist()
        suspects = [x for x, total in zip(found, sums, strict=True) if not math.isfinite(total)]
        return next((name for name, tensor in suspects if not torch.isfinite(tensor).all()), None)
