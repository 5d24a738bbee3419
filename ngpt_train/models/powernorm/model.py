"""PowerNorm (Shen, Yao, Gholami, Mahoney and Keutzer 2020): the baseline's decoder with a norm over the batch.

The model is gpt/model.py with every RMSNorm replaced by one of the paper's four norms. Nothing else differs, so that a
comparison of such models compares the norms.

Symbols are the paper's: X, X_hat, Y `(B, T, d)`, whose valid tokens are the paper's B rows; psi, nu, gamma, beta,
Gamma, Lambda `(d,)`. gamma and beta are the parameters `gain` and `bias`.

In training PN-V and BatchNorm are not causal, nor is PowerNorm in its warm-up: the statistics of a batch include later
tokens. These leak into the training loss, which is too low. Evaluation uses running statistics, which do not depend on
the row, and is always causal.
"""

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.mlp import MLP
from ngpt_train.models.layers.norms import residual
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.powernorm.keys import PowerNormConfig
from ngpt_train.models.powernorm.running_statistics import (
    BatchStatistics,
    DecoderOverBatch,
    Normed,
    NormOverBatch,
    NormPass,
    Output,
    Running,
    RunningStatistics,
    Used,
    move_average_,
)


class PowerNorm(NormOverBatch):
    """Algorithm 2, in its order. The backward pass is eq. 11 and 12, not the derivative of the forward pass.

    psi is sqrt(psi_squared + eps). In the warm-up X is divided by the batch's own psi, and psi_squared is the mean over
    the batches so far. nu is kept in units of the summed loss, whatever scales the loss of a step.
    """

    starts: ClassVar = {"psi_squared": 1.0, "nu": 0.0}
    psi_squared: Tensor
    nu: Tensor
    n_warmup: Tensor

    def __init__(self, size: int, config: PowerNormConfig) -> None:
        super().__init__(size, config)
        self.register_buffer("n_warmup", torch.zeros(()), persistent=False)  # forward passes of the warm-up so far

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.n_warmup.zero_()

    # begin Forward Propagation

    def running_statistics(self, warming_up: bool, loss_factor: Tensor | float) -> Used:
        if not self.training:
            return None
        psi = None if warming_up else self.root(self.psi_squared)
        return RunningStatistics(psi, self.nu * loss_factor, torch.zeros_like(self.nu, requires_grad=True))

    def forward_in_training(self, X: Tensor, valid: Tensor | None, running: Used) -> Normed:
        assert running is not None
        psi_B_squared, n_tokens = self.mean(X.detach().square(), valid)  # Get mini-batch statistics
        psi = self.root(psi_B_squared) if running.psi is None else running.psi
        Y = _PowerNormFunction.apply(X, psi, self.gain, self.bias, running.nu, running.sum_for_Lambda, valid)
        return Y, BatchStatistics((psi_B_squared,), n_tokens)

    @staticmethod
    def forward_pass(X: Tensor, psi: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        X_hat = X / psi  # eq. 8: Normalize
        Y = gamma * X_hat + beta  # eq. 9: Scale and shift
        return Y, X_hat

    @torch.no_grad()
    def update_(self, running: Used, batch: BatchStatistics | None, loss_factor: Tensor | float) -> None:
        """psi^2 <- psi^2 + share (psi_B^2 - psi^2). share: 1 - alpha, in the warm-up 1 / number of batches so far."""
        if running is None or batch is None:
            return
        (psi_B_squared,) = batch.values
        counts = batch.counts()
        if running.psi is None:
            self.n_warmup += counts
            psi_squared = psi_B_squared + self.eps
            share = counts / self.n_warmup.clamp(min=1)
        else:
            psi_squared = running.psi.square()
            share = (1 - self.alpha_fwd) * counts
        move_average_(self.psi_squared, psi_B_squared, share)  # eq. 10
        # The mean of X_hat^2 = X^2 / psi^2, without another pass over X.
        Gamma = psi_B_squared / psi_squared
        update_nu_ = partial(self.update_nu_, Gamma, batch.n_tokens * loss_factor)
        running.sum_for_Lambda.register_hook(update_nu_)

    # begin Backward Propagation

    @staticmethod
    def backward_pass(dL_dY: Tensor, X_hat: Tensor, psi: Tensor, gamma: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
        dL_dX_hat = gamma * dL_dY  # Intermediate Gradient
        X_hat_prime = dL_dX_hat - nu * X_hat  # eq. 11: Intermediate Estimated Gradient
        dL_dX = X_hat_prime / psi  # eq. 12: Gradient of X
        return dL_dX, dL_dX_hat

    @torch.no_grad()
    def update_nu_(self, Gamma: Tensor, n_tokens: Tensor, sum_for_Lambda: Tensor) -> None:
        """nu <- nu (1 - (1 - alpha) Gamma) + (1 - alpha) Lambda, as printed in eq. 13.

        Gamma is the mean of X_hat^2, Lambda the mean of dL/dX_hat * X_hat. The last statement has the form of eq. 10:
        nu <- nu + (1 - alpha) (nu (1 - Gamma) + Lambda - nu).

        sum_for_Lambda: the gradient of the tensor of zeros, which autograd has computed. n_tokens: multiplied by
        loss_factor, so that Lambda is in units of the summed loss.
        """
        Lambda = self.over_ranks(sum_for_Lambda) / n_tokens.clamp(min=torch.finfo(n_tokens.dtype).tiny)
        move_average_(self.nu, self.nu * (1 - Gamma) + Lambda, 1 - self.alpha_bkw)  # eq. 13

    # Inference

    def infer(self, X: Tensor) -> Tensor:
        Y, _ = self.forward_pass(X, self.root(self.psi_squared), self.gain, self.bias)
        return Y


class _PowerNormFunction(torch.autograd.Function):
    """PowerNorm's two passes as an autograd function. Padding gets no gradient and does not count in Lambda."""

    @staticmethod
    def forward(
        ctx: Any, X: Tensor, psi: Tensor, gamma: Tensor, beta: Tensor, nu: Tensor, sum_for_Lambda: Tensor,
        valid: Tensor | None,
    ) -> Tensor:  # fmt: skip
        Y, X_hat = PowerNorm.forward_pass(X, psi, gamma, beta)
        ctx.save_for_backward(X_hat, psi, gamma, nu, valid)
        return Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        X_hat, psi, gamma, nu, valid = ctx.saved_tensors
        (dL_dY,) = gradients
        dL_dX, dL_dX_hat = PowerNorm.backward_pass(dL_dY, X_hat, psi, gamma, nu)
        if valid is not None:
            dL_dX, dL_dX_hat = dL_dX * valid.unsqueeze(-1), dL_dX_hat * valid.unsqueeze(-1)
        dL_dgamma, dL_dbeta = (dL_dY * X_hat).sum((0, 1)), dL_dY.sum((0, 1))
        return dL_dX, None, dL_dgamma, dL_dbeta, None, (dL_dX_hat * X_hat).sum((0, 1)), None


class PowerNormV(NormOverBatch):
    """PN-V: X divided by the batch's own psi. autograd computes the exact gradient, through psi too (eq. 6)."""

    starts: ClassVar = {"psi_squared": 1.0}
    psi_squared: Tensor

    def forward_in_training(self, X: Tensor, valid: Tensor | None, running: Used) -> Normed:
        psi_B_squared, n_tokens = self.mean(X.square(), valid)
        X_hat = X / self.root(psi_B_squared)  # eq. 4
        Y = self.gain * X_hat + self.bias  # eq. 5
        return Y, BatchStatistics((psi_B_squared.detach(),), n_tokens.detach())

    def infer(self, X: Tensor) -> Tensor:
        return self.gain * (X / self.root(self.psi_squared)) + self.bias


class BatchNorm(NormOverBatch):
    """Algorithm 1. autograd computes the exact gradient (eq. 3)."""

    starts: ClassVar = {"mu": 0.0, "variance": 1.0}
    mu: Tensor
    variance: Tensor

    def forward_in_training(self, X: Tensor, valid: Tensor | None, running: Used) -> Normed:
        mu_B, n_tokens = self.mean(X, valid)
        sigma_B_squared, _ = self.mean((X - mu_B).square(), valid)
        X_hat = (X - mu_B) / self.root(sigma_B_squared)  # eq. 1
        Y = self.gain * X_hat + self.bias  # eq. 2
        return Y, BatchStatistics((mu_B.detach(), sigma_B_squared.detach()), n_tokens.detach())

    def infer(self, X: Tensor) -> Tensor:
        return self.gain * ((X - self.mu) / self.root(self.variance)) + self.bias


class PerToken(NormOverBatch):
    """LayerNorm, with the interface of a norm over the batch. It has no running statistics."""

    def forward(self, x: Tensor, valid: Tensor | None, running: Used) -> tuple[Tensor, BatchStatistics | None]:
        X = self.group_scaled(x.to(self.gain.dtype))
        return F.layer_norm(X, self.gain.shape, self.gain, self.bias, self.eps).to(x.dtype), None


NORMS: dict[str, type[NormOverBatch]] = {"pn": PowerNorm, "pn_v": PowerNormV, "batch": BatchNorm, "layer": PerToken}


class PowerNormBlock(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)). It returns h and the batch statistics of its two norms."""

    def __init__(self, config: PowerNormConfig) -> None:
        super().__init__()
        self.norm_attn = NORMS[config.norm](config.d_model, config)
        self.attention = Attention(config)
        self.norm_mlp = NORMS[config.norm](config.d_model, config)
        self.mlp = MLP(config)
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)

    def forward(self, h: Tensor, rope: Rope | None, mask: Mask, valid: Tensor | None, running: Running) -> Output:
        """valid `(B, T)` is false for padding, None: all tokens are valid. running: the statistics of each norm."""
        norms = NormPass(valid, running)
        attend = partial(self.attention, rope=rope, mask=mask)
        h = residual(h, attend, self.drop_attn, norm_in=norms(self.norm_attn))
        h = residual(h, self.mlp, self.drop_mlp, norm_in=norms(self.norm_mlp))
        return h, tuple(norms.batches)  # h (B, T, d_model)


class PowerNormDecoder(DecoderOverBatch):
    """Logits = E_output norm(h); `stack` ends with the norm. Padding (doc_ids below 0) counts in no statistic."""

    def __init__(self, config: PowerNormConfig) -> None:
        super().__init__(config, (PowerNormBlock(config) for _ in range(config.n_layers)))
        self.norm_final = NORMS[config.norm](config.d_model, config)


Model = PowerNormDecoder  # what build_model builds
