"""The end of a model: logits, or their loss without holding them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels.cross_entropy import linear_cross_entropy


class Loss(NamedTuple):
    """Of the targets that count (not -100), 0-dim."""

    total: Tensor  # what is differentiated: the summed cross-entropy and in training z_loss * logsumexp(logits)^2
    n_tokens: Tensor  # how many they are
    cross_entropy: Tensor  # its first part, in nats, without gradient
    z_term: Tensor | None  # its second part, if there is one


class Head(NamedTuple):
    """Logits = scale * (matrix h): h `(B, T, d_model)`, matrix `(V, d_model)` as it is stored, scale `(V,)` or None."""

    h: Tensor
    matrix: Tensor
    scale: Tensor | None = None

    def logits(self) -> Tensor:
        """`(B, T, V)`, at least fp32."""
        logits = F.linear(self.h, self.matrix.to(self.h.dtype)).to(torch.promote_types(self.h.dtype, torch.float32))
        return logits if self.scale is None else logits * self.scale

    def loss(self, targets: Tensor, z_loss: float) -> Loss:
        """Of the targets `(B, T)`, without the logits."""
        total, cross_entropy, z_term = linear_cross_entropy(self.h, self.matrix, targets, self.scale, z_loss)
        return Loss(total, (targets != IGNORED).sum(), cross_entropy, z_term)
