"""The end of a model: the logits, or their loss, which is computed without holding all logits."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels.cross_entropy import linear_cross_entropy, token_losses


class Loss(NamedTuple):
    """Sums over the targets that count, that is, are not -100; 0-dim tensors."""

    total: Tensor  # the loss that is differentiated: the smoothed cross-entropy + z_term
    n_tokens: Tensor  # number of targets that count
    cross_entropy: Tensor  # in nats, without smoothing and without gradient
    z_term: Tensor | None  # z_loss * logsumexp(logits)^2, without gradient; None if z_loss is 0
    by_token: Tensor | None = None  # (B, T) the cross-entropy of each target, 0 if it does not count; in no_grad


class Head(NamedTuple):
    """Logits = scale * (matrix h): h `(B, T, d_model)`, matrix `(V, d_model)` as it is stored, scale `(V,)` or None."""

    h: Tensor
    matrix: Tensor
    scale: Tensor | None = None

    def logits(self) -> Tensor:
        """Logits `(B, T, V)` in at least fp32."""
        logits = F.linear(self.h, self.matrix.to(self.h.dtype)).to(torch.promote_types(self.h.dtype, torch.float32))
        return logits if self.scale is None else logits * self.scale

    def loss(self, targets: Tensor, z_loss: float, label_smoothing: float = 0.0) -> Loss:
        """The loss of targets `(B, T)`, computed without holding all logits."""
        n_tokens = (targets != IGNORED).sum()
        if not torch.is_grad_enabled() and z_loss == label_smoothing == 0:
            losses = token_losses(self.h, self.matrix, targets, self.scale)
            total = losses.sum()
            return Loss(total, n_tokens, total, None, losses)
        total, cross_entropy, z_term = linear_cross_entropy(
            self.h, self.matrix, targets, self.scale, z_loss, label_smoothing
        )
        return Loss(total, n_tokens, cross_entropy, z_term)
