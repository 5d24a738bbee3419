"""Parameters in groups that the optimizer treats alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder

# The kinds of matrices by name, as of LrFactors; all others are hidden ones.
_KINDS = {"embedding": "embedding", "source_embedding": "embedding", "output": "output"}


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike."""

    names: list[str]  # as in named_parameters
    decay: bool  # whether weight decay applies
    unit_rows: bool  # whether every row is divided by its length after a step, as by the model's project_
    kind: str | None = None  # of the matrices, a field of LrFactors; None: vectors, or matrices of several kinds


def parameter_groups(model: Decoder) -> list[ParameterGroup]:
    """Two groups: matrices, including embeddings, which may decay; gains and scale vectors, which never do. Where the
    architecture has learning rates by kind (`ModelConfig.lr_factors`), a group of each kind.

    There are two even where nothing decays: FSDP2 shards the matrices and keeps the vectors whole, and torch's fused
    optimizers refuse sharded and whole tensors in one group.
    """
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    matrices = [name for name, ndim in shapes.items() if ndim >= 2]
    by_kind: dict[str | None, list[str]] = {None: matrices}
    if model.config.lr_factors(steps=1) is not None:
        kinds = ("embedding", "hidden", "output")
        by_kind = {kind: [name for name in matrices if _KINDS.get(name, "hidden") == kind] for kind in kinds}
    return [
        *(ParameterGroup(names, model.decays, model.projects, kind) for kind, names in by_kind.items()),
        ParameterGroup([name for name, ndim in shapes.items() if ndim < 2], decay=False, unit_rows=False),
    ]
