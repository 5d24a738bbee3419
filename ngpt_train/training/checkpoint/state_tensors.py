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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from ngpt_train.models.weights import canonical, named_weights
from ngpt_train.optim.row_adam import local_rows

if TYPE_CHECKING:
    from ngpt_train.distributed.world import World
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.training.state import TrainState

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class RankRows(Tensor):
    """A sharded tensor of the shape `size`. This rank holds `rows`, from number `first` on; there may be none.

    It has the two methods of a DTensor that writing and reading a checkpoint need.
    """

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
        offsets = torch.Size((self.first, *(0 for _ in self.rows.shape[1:])))
        return [ChunkStorageMetadata(offsets, self.rows.shape)] if len(self.rows) else []

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.rows


def parts_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """parts[parameter][weight]: rows of each weight in each parameter of `model`, weights by canonical name."""
    names = (name for name, _ in model.named_parameters())
    stacked = (parts for _, parts in named_weights(model))
    return {
        name: {canonical(path): rows for path, rows in parts.items()}
        for name, parts in zip(names, stacked, strict=True)
    }


def by_canonical_name(model: nn.Module, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The tensors of `tensors` under canonical names; other values are left out.

    tensors: by part of the state, as `save.py` and `load.py` collect them: `model` and `ema` by the name of the
    parameter, `optimizer` by `state.PARAMETER.MOMENT`, `statistics` by name.
    """
    parts = parts_of(model)
    found: dict[str, Tensor] = {}
    for section, named in tensors.items():
        for name, value in named.items():
            if not isinstance(value, Tensor):
                continue
            if section == "optimizer":
                parameter, _, kind = name.removeprefix("state.").rpartition(".")
            else:
                parameter, kind = name, "" if section == "model" else section
            stacked = {name: 1} if section == "statistics" else parts.get(parameter, {canonical(parameter): 1})
            for part, rows in cut(value, stacked).items():
                found[f"{kind}.{part}" if kind else part] = rows
    return found


def cut(tensor: Tensor, parts: Mapping[str, int]) -> dict[str, Tensor]:
    """Cuts `tensor` into a view for each part. parts: rows by name, in order.

    A 0-dim tensor, such as a count of steps, goes to the first part; the others get copies.
    """
    if len(parts) == 1:
        return dict.fromkeys(parts, tensor)
    if tensor.ndim == 0:
        return {name: tensor if index == 0 else tensor.clone() for index, name in enumerate(parts)}
    if not isinstance(tensor, DTensor):
        return dict(zip(parts, tensor.split(list(parts.values())), strict=True))
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    first = chunk.offsets[0]  # of this rank's rows
    found: dict[str, Tensor] = {}
    begin = 0  # of the part
    for name, rows in parts.items():
        mine = slice(max(begin, first), max(begin, first, min(begin + rows, first + len(local))))
        found[name] = RankRows(
            local[mine.start - first : mine.stop - first], mine.start - begin, torch.Size((rows, *tensor.shape[1:]))
        )
        begin += rows
    return found


def moving_average(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """The state's moving average under its name in a checkpoint, if there is one."""
    return {} if state.ema is None else {"ema": state.ema.weights}


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


def first_not_finite(state: TrainState) -> str | None:
    """The first weight, moment, average or running statistic of this rank with a NaN or an infinity; None if there is
    none. Waits for the device once."""
    with torch.no_grad():
        found = [(name, tensor) for name, tensor in _tensors(state) if tensor.is_floating_point()]
        # A sum passes once over memory, and is finite only if all its terms are. Finite terms may overflow, too.
        sums = torch.stack([tensor.sum().float().to(state.world.device) for _, tensor in found]).tolist()
        suspects = [x for x, total in zip(found, sums, strict=True) if not math.isfinite(total)]
        return next((name for name, tensor in suspects if not torch.isfinite(tensor).all()), None)


def weights_and_moments(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Weights and moments as the model and the optimizer hold them, with names for people."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    for parameter, name in names.items():
        yield name, parameter
    for parameter, moments in state.optimizer.state.items():
        for moment, value in moments.items():
            if isinstance(value, Tensor):
                # Between a validation and the next step FSDP2 puts whole matrices in place of the model's shards.
                yield f"{moment} of {names.get(parameter, 'a matrix')}", value


def _tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors of a checkpoint, with names for people."""
    for name, tensor in weights_and_moments(state):
        yield name, local_rows(tensor)
    yield from state.model.statistics().items()
    if state.ema is not None:
        for name, average in state.ema.weights.items():
            yield f"the moving average of {name}", local_rows(average)
