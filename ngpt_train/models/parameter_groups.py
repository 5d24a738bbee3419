"""Which parameters the optimizer treats alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike."""

    names: list[str]
    decay: bool
    unit_rows: bool  # after a step every row is divided by its length: what project_ does


def parameter_groups(model: Decoder) -> list[ParameterGroup]:
    """Matrices, embeddings included, may decay; gains and scale vectors never.

    Two groups even where nothing decays: under FSDP2 matrices alone are sharded, and torch's fused
    optimizers refuse sharded and whole tensors in one group.
    """
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    return [
        ParameterGroup([name for name, ndim in shapes.items() if ndim >= 2], model.decays, model.projects),
        ParameterGroup([name for name, ndim in shapes.items() if ndim < 2], decay=False, unit_rows=False),
    ]
