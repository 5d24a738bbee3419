"""Norms over the tokens of a batch, channel by channel: PowerNorm, PN-V and BatchNorm (Shen et al. 2020).

A forward pass changes nothing. What it needs to know of earlier batches goes in as `Before`, what is to be
remembered of this one comes out, and the model hands it to `remember_` when the pass is over. So recomputation
under activation checkpointing sees what the first computation saw, several forward passes may precede a
backward pass, and torch.compile finds a pure function.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.models.powernorm.keys import PowerNormConfig


class Before(NamedTuple):
    """What PowerNorm knows before a forward pass, each `(C,)`."""

    psi: Tensor | None  # quadratic mean to divide by; None in the warm-up: that of the batch
    nu: Tensor  # running mean of dL/dx_hat * x_hat (Lambda), L in units of the loss that backward is called on
    probe: Tensor  # zeros; backward leaves the sum of dL/dx_hat * x_hat in its gradient


class Batch(NamedTuple):
    """What one forward pass has found, for `remember_`."""

    statistics: tuple[Tensor, ...]  # each (C,)
    n_tokens: Tensor  # 0-dim: how many they were taken over

    def counts(self) -> Tensor:
        """1, or 0 where there was nothing but padding, or the pass was not finite: its step is skipped."""
        finite = torch.stack([statistic.isfinite().all() for statistic in self.statistics]).all()
        return (finite & (self.n_tokens > 0)).to(self.n_tokens.dtype)


class BatchStatisticNorm(nn.Module):
    """gain * x_hat + bias, where x_hat is x divided by statistics over the tokens of the batch, per channel.

    Statistics and the norm are computed in fp32 (fp64 for an fp64 model). Evaluation uses running statistics.
    x `(B, T, C)`; valid `(B, T)` is false for padding, which counts in no statistic; None: all are valid.
    """

    def __init__(self, size: int, config: PowerNormConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.alpha_fwd, self.alpha_bkw = config.alpha_fwd, config.alpha_bkw
        self.groups = int(config.group_scaling)
        self.gain = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        # Sums a tensor over ranks, differentiably. Set from outside where statistics are synchronised.
        self.over_ranks: Callable[[Tensor], Tensor] = one_rank

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def statistics(self) -> dict[str, Tensor]:
        """The running statistics by name; they are no weights, and are changed in place."""
        return dict(self.named_buffers(recurse=False))

    def before(self, warming_up: bool, loss_scale: Tensor | float) -> Before | None:
        """What the next forward pass has to be given; loss_scale: what its summed loss will be multiplied by."""
        return None

    @torch.no_grad()
    def remember_(self, before: Before | None, batch: Batch | None, loss_scale: Tensor | float) -> None:
        """Advances the running statistics by those that a forward pass has returned."""
        if batch is None:
            return
        for running, new in zip(self.statistics().values(), batch.statistics, strict=True):
            advance_(running, new, (1 - self.alpha_fwd) * batch.counts())

    def over_batch(self, x: Tensor, valid: Tensor | None, before: Before | None) -> tuple[Tensor, Batch]:
        """x_hat `(B, T, C)` in training, and the statistics of the batch."""
        raise NotImplementedError

    def by_running(self, x: Tensor) -> Tensor:
        """x_hat `(B, T, C)` in evaluation."""
        raise NotImplementedError

    def forward(self, x: Tensor, valid: Tensor | None, before: Before | None) -> tuple[Tensor, Batch | None]:
        scaled = self.group_scaled(x.to(self.gain.dtype))
        x_hat, batch = self.over_batch(scaled, valid, before) if self.training else (self.by_running(scaled), None)
        return (self.gain * x_hat + self.bias).to(x.dtype), batch

    def group_scaled(self, x: Tensor) -> Tensor:
        """Each token's channels, group by group, brought to a quadratic mean of 1 (the paper's layer-scale, A.1)."""
        if not self.groups:
            return x
        grouped = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)

    def mean(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean `(C,)` over the valid tokens, and their number; of this rank or, synchronised, of all ranks."""
        weight = x.new_ones(x.shape[:2]) if valid is None else valid.to(x.dtype)
        weighted = x if valid is None else x * weight.unsqueeze(-1)
        total = self.over_ranks(torch.cat([weighted.sum((0, 1)), weight.sum().view(1)]))
        return total[:-1] / total[-1].clamp(min=1), total[-1]


class _DivideByPsi(torch.autograd.Function):
    """x_hat = x / psi, with PowerNorm's backward pass: dL/dx = (dL/dx_hat - nu x_hat) / psi (eq. 11 and 12)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, psi: Tensor, nu: Tensor, probe: Tensor, valid: Tensor | None) -> Tensor:
        x_hat = x / psi
        ctx.save_for_backward(x_hat, psi, nu, valid)
        return x_hat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, psi, nu, valid = ctx.saved_tensors
        (gradient,) = gradients
        corrected = gradient - nu * x_hat
        if valid is not None:
            gradient, corrected = gradient * valid.unsqueeze(-1), corrected * valid.unsqueeze(-1)
        return corrected / psi, None, None, (gradient * x_hat).sum((0, 1)), None


class PowerNorm(BatchStatisticNorm):
    """Algorithm 2: divides by the running quadratic mean psi, and corrects the gradient by its running mean nu.

    psi is sqrt(psi^2 + eps). In the warm-up it is the batch's own, in the backward pass too, where nu corrects as
    after it, and the running one is the mean over the batches so far.
    nu is kept in units of the summed loss, so that a loss scaled by another number in each step leaves it alone.
    """

    psi_squared: Tensor
    nu: Tensor
    n_warmup: Tensor

    def __init__(self, size: int, config: PowerNormConfig) -> None:
        super().__init__(size, config)
        for name in ("psi_squared", "nu"):
            self.register_buffer(name, torch.empty(size), persistent=False)
        self.register_buffer("n_warmup", torch.empty(()), persistent=False)  # forward passes of the warm-up
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.psi_squared.fill_(1.0)
        self.nu.zero_()
        self.n_warmup.zero_()

    def before(self, warming_up: bool, loss_scale: Tensor | float) -> Before | None:
        if not self.training:
            return None
        psi = None if warming_up else (self.psi_squared + self.eps).sqrt()
        return Before(psi, self.nu * loss_scale, torch.zeros_like(self.nu, requires_grad=True))

    def over_batch(self, x: Tensor, valid: Tensor | None, before: Before | None) -> tuple[Tensor, Batch]:
        assert before is not None
        psi_squared, n_tokens = self.mean(x.detach().square(), valid)
        psi = (psi_squared + self.eps).sqrt() if before.psi is None else before.psi  # eq. 8
        return _DivideByPsi.apply(x, psi, before.nu, before.probe, valid), Batch((psi_squared,), n_tokens)

    def by_running(self, x: Tensor) -> Tensor:
        return x / (self.psi_squared + self.eps).sqrt()

    @torch.no_grad()
    def remember_(self, before: Before | None, batch: Batch | None, loss_scale: Tensor | float) -> None:
        if before is None or batch is None:
            return
        (psi_squared,) = batch.statistics
        counts = batch.counts()
        if before.psi is None:
            self.n_warmup += counts
            used_squared = psi_squared + self.eps
            advance_(self.psi_squared, psi_squared, counts / self.n_warmup.clamp(min=1))
        else:
            used_squared = before.psi.square()
            advance_(self.psi_squared, psi_squared, (1 - self.alpha_fwd) * counts)  # eq. 10
        # The mean of x_hat^2, without another pass over x.
        gamma = psi_squared / used_squared
        before.probe.register_hook(partial(self.remember_backward_, gamma, batch.n_tokens * loss_scale))

    @torch.no_grad()
    def remember_backward_(self, gamma: Tensor, n_tokens: Tensor, gradient: Tensor) -> None:
        """nu (1 - (1 - alpha_bkw) Gamma) + (1 - alpha_bkw) Lambda: eq. 13.

        gradient: the sum of dL/dx_hat * x_hat over the tokens; n_tokens: times the scale of the loss.
        """
        mean = self.over_ranks(gradient) / n_tokens.clamp(min=torch.finfo(n_tokens.dtype).tiny)
        advance_(self.nu, self.nu * (1 - gamma) + mean, 1 - self.alpha_bkw)  # the same, with Lambda = mean


class PowerNormV(BatchStatisticNorm):
    """PN-V: x / psi_B with the exact gradient, by way of psi_B as well (eq. 4 to 6)."""

    psi_squared: Tensor

    def __init__(self, size: int, config: PowerNormConfig) -> None:
        super().__init__(size, config)
        self.register_buffer("psi_squared", torch.empty(size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.psi_squared.fill_(1.0)

    def over_batch(self, x: Tensor, valid: Tensor | None, before: Before | None) -> tuple[Tensor, Batch]:
        psi_squared, n_tokens = self.mean(x.square(), valid)
        return x / (psi_squared + self.eps).sqrt(), Batch((psi_squared.detach(),), n_tokens.detach())

    def by_running(self, x: Tensor) -> Tensor:
        return x / (self.psi_squared + self.eps).sqrt()


class BatchNorm(BatchStatisticNorm):
    """(x - mu_B) / sigma_B with the exact gradient (Algorithm 1)."""

    mu: Tensor
    variance: Tensor

    def __init__(self, size: int, config: PowerNormConfig) -> None:
        super().__init__(size, config)
        self.register_buffer("mu", torch.empty(size), persistent=False)
        self.register_buffer("variance", torch.empty(size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.mu.zero_()
        self.variance.fill_(1.0)

    def over_batch(self, x: Tensor, valid: Tensor | None, before: Before | None) -> tuple[Tensor, Batch]:
        mu, n_tokens = self.mean(x, valid)
        variance, _ = self.mean((x - mu).square(), valid)
        x_hat = (x - mu) / (variance + self.eps).sqrt()
        return x_hat, Batch((mu.detach(), variance.detach()), n_tokens.detach())

    def by_running(self, x: Tensor) -> Tensor:
        return (x - self.mu) / (self.variance + self.eps).sqrt()


class PerToken(BatchStatisticNorm):
    """LayerNorm in the place of a norm over the batch: there is nothing to remember."""

    def __init__(self, size: int, config: PowerNormConfig) -> None:
        super().__init__(size, config)
        self.reset_parameters()

    def forward(self, x: Tensor, valid: Tensor | None, before: Before | None) -> tuple[Tensor, Batch | None]:
        y = F.layer_norm(x.to(self.gain.dtype), self.gain.shape, self.gain, self.bias, self.eps)
        return y.to(x.dtype), None


def one_rank(x: Tensor) -> Tensor:
    """The sum over ranks where each takes its own statistics."""
    return x


def advance_(running: Tensor, new: Tensor, share: Tensor | float) -> None:
    """running + share (new - running), in place; what is not finite is forgotten."""
    running.copy_(torch.where(new.isfinite(), running + share * (new - running), running))
