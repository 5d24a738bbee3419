"""Parameters in groups that the optimizer treats alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike."""

    names: list[str]  # as in named_parameters
    decay: bool  # whether weight decay applies
    unit_rows: bool  # whether every row is divided by its length after a step, as by the model's project_


def parameter_groups(model: Decoder) -> list[ParameterGroup]:
    """Two groups: matrices, including embeddings, which may decay; gains and scale vectors, which never do.

    There are two even where nothing decays: FSDP2 shards the matrices and keeps the vectors whole, and torch's fused
    optimizers refuse sharded and whole tensors in one group.
    """
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    return [
        ParameterGroup([name for name, ndim in shapes.items() if ndim >= 2], model.decays, model.projects),
        ParameterGroup([name for name, ndim in shapes.items() if ndim < 2], decay=False, unit_rows=False),
    ]
