"""The angular step cap of "Training nGPT" (arXiv 2608.01284): a bound on how far a row turns in one step.

Second-hand: we know the paper from a description by others. For a row w on the sphere and the optimizer's w~:

    c = <w, w~>        u = w~ - c w        phi = atan2(||u||, c), the angle between them
    w~ <- cos(theta) w + sin(theta) u / ||u||, if phi > theta

The paper caps before the projection. Here the cap comes after it, which is the same: the projection keeps the direction
of w~, phi and u / ||u|| depend on nothing else, and the capped row has length 1. So any optimizer will do, one that
projects in its own pass too. The paper's theta may change with the step, in a way that we do not know; ours is
optim.angle_cap at every step. Embeddings have no cap, as there.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ngpt_train.kernels.norm import SHORTEST, normalize
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.rank_rows import local_rows
from ngpt_train.models.weights import OUTSIDE_OF_BLOCKS


def hidden_matrices(model: Decoder) -> list[Tensor]:
    """The matrices of the blocks: all but the embeddings."""
    return [x for name, x in model.named_parameters() if x.ndim == 2 and name not in OUTSIDE_OF_BLOCKS]


@contextmanager
def turning_at_most(theta: float, matrices: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the rows of matrices `(rows, d)` move on the sphere; none turns by more than theta radians.

    Keeps a copy of the matrices meanwhile. A row that turns less keeps its bits. FSDP2 shards by whole rows, so each
    rank caps its own without communication.
    """
    before = [local_rows(matrix).detach().clone() for matrix in matrices]
    yield
    for matrix, old in zip(matrices, before, strict=True):
        cap_(local_rows(matrix), old, theta)


@torch.no_grad()
def cap_(moved: Tensor, before: Tensor, theta: float) -> None:
    """Turns the rows of moved `(rows, d)` that are further than theta from before `(rows, d)` back to it, in place."""
    w = normalize(before)  # on the sphere but for rounding
    c = (w * moved).sum(-1, keepdim=True)
    u = moved - c * w
    length = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    angle = torch.atan2(length, c)
    capped = normalize(math.cos(theta) * w + math.sin(theta) * u / length.clamp_min(SHORTEST))
    moved.copy_(torch.where(angle > theta, capped, moved))
