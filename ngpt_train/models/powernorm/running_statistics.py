"""What the norms over a batch have in common, and what activation checkpointing and torch.compile need around them.

A block that is recomputed or compiled must be a pure function: it changes no buffer. So a forward pass is given the
running statistics, returns the statistics of its batch, and the decoder updates the former by the latter once the
pass is over. Several forward passes may precede a backward pass, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.models.powernorm.keys import PowerNormConfig


class RunningStatistics(NamedTuple):
    """What PowerNorm's forward pass is given, each `(d,)`."""

    psi: Tensor | None  # to divide by; None in the warm-up: the batch's own
    nu: Tensor  # in units of the loss that backward is called on
    sum_for_Lambda: Tensor  # zeros; the backward pass leaves the sum of dL/dX_hat * X_hat in its gradient


class BatchStatistics(NamedTuple):
    """What a forward pass has found."""

    values: tuple[Tensor, ...]  # each (d,)
    n_tokens: Tensor  # 0-dim: how many they were taken over

    def counts(self) -> Tensor:
        """1, or 0 where there was nothing but padding, or the pass was not finite: its step is skipped."""
        finite = torch.stack([value.isfinite().all() for value in self.values]).all()
        return (finite & (self.n_tokens > 0)).to(self.n_tokens.dtype)


class NormOverBatch(nn.Module):
    """gain * X_hat + bias, where X_hat is X divided by statistics over the tokens of the batch, per channel.

    Statistics and the norm are computed in fp32 (fp64 for an fp64 model). Evaluation uses running statistics.
    X `(B, T, d)`; valid `(B, T)` is false for padding, which counts in no statistic; None: all are valid.
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

    def running_statistics(self, warming_up: bool, loss_scale: Tensor | float) -> RunningStatistics | None:
        """What the next forward pass is to be given; loss_scale: what its summed loss will be multiplied by."""
        return None

    @torch.no_grad()
    def update_(
        self, running: RunningStatistics | None, batch: BatchStatistics | None, loss_scale: Tensor | float
    ) -> None:
        """Updates the running statistics after a forward pass, by what it was given and what it has found."""
        if batch is None:
            return
        for mean, value in zip(self.statistics().values(), batch.values, strict=True):
            move_average_(mean, value, (1 - self.alpha_fwd) * batch.counts())

    def train_on(
        self, X: Tensor, valid: Tensor | None, running: RunningStatistics | None
    ) -> tuple[Tensor, BatchStatistics]:
        """Y `(B, T, d)` in training, and the statistics of the batch."""
        raise NotImplementedError

    def infer(self, X: Tensor) -> Tensor:
        """Y `(B, T, d)` in evaluation, by the running statistics."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, valid: Tensor | None, running: RunningStatistics | None
    ) -> tuple[Tensor, BatchStatistics | None]:
        X = self.group_scaled(x.to(self.gain.dtype))
        Y, batch = self.train_on(X, valid, running) if self.training else (self.infer(X), None)
        return Y.to(x.dtype), batch

    def group_scaled(self, x: Tensor) -> Tensor:
        """Each token's channels, group by group, brought to a quadratic mean of 1 (the paper's layer-scale, A.1)."""
        if not self.groups:
            return x
        grouped = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)

    def mean(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean `(d,)` over the valid tokens, and their number; of this rank or, synchronised, of all ranks."""
        weight = x.new_ones(x.shape[:2]) if valid is None else valid.to(x.dtype)
        weighted = x if valid is None else x * weight.unsqueeze(-1)
        total = self.over_ranks(torch.cat([weighted.sum((0, 1)), weight.sum().view(1)]))
        return total[:-1] / total[-1].clamp(min=1), total[-1]

    def root(self, mean_square: Tensor) -> Tensor:
        return (mean_square + self.eps).sqrt()


def one_rank(x: Tensor) -> Tensor:
    """The sum over ranks where each takes its own statistics."""
    return x


def move_average_(mean: Tensor, value: Tensor, share: Tensor | float) -> None:
    """mean + share (value - mean), in place; what is not finite is left out."""
    mean.copy_(torch.where(value.isfinite(), mean + share * (value - mean), mean))


Pass = Callable[[tuple[RunningStatistics | None, ...]], tuple[Tensor, tuple[BatchStatistics | None, ...]]]


def updating(norms: Sequence[NormOverBatch], warming_up: bool, loss_scale: Tensor | float, compute: Pass) -> Tensor:
    """The result of `compute`, a pure function of the running statistics of `norms`, which it updates afterwards."""
    running = tuple(norm.running_statistics(warming_up, loss_scale) for norm in norms)
    h, batches = compute(running)
    for norm, given, found in zip(norms, running, batches, strict=True):
        norm.update_(given, found, loss_scale)
    return h


class NormWithNu(NormOverBatch):
    """PowerNorm's running statistics, around the forward and the backward pass that `PowerNorm` defines.

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

    def update_psi_(self, psi_B_squared: Tensor, share: Tensor | float) -> None:
        raise NotImplementedError

    def update_nu_(self, Gamma: Tensor, Lambda: Tensor) -> None:
        raise NotImplementedError

    def running_statistics(self, warming_up: bool, loss_scale: Tensor | float) -> RunningStatistics | None:
        if not self.training:
            return None
        psi = None if warming_up else self.root(self.psi_squared)
        return RunningStatistics(psi, self.nu * loss_scale, torch.zeros_like(self.nu, requires_grad=True))

    @torch.no_grad()
    def update_(
        self, running: RunningStatistics | None, batch: BatchStatistics | None, loss_scale: Tensor | float
    ) -> None:
        if running is None or batch is None:
            return
        (psi_B_squared,) = batch.values
        counts = batch.counts()
        if running.psi is None:  # the mean over the batches of the warm-up
            self.n_warmup += counts
            psi_squared = psi_B_squared + self.eps
            self.update_psi_(psi_B_squared, counts / self.n_warmup.clamp(min=1))
        else:
            psi_squared = running.psi.square()
            self.update_psi_(psi_B_squared, (1 - self.alpha_fwd) * counts)
        # The mean of X_hat^2, without another pass over X.
        Gamma = psi_B_squared / psi_squared
        after_backward = partial(self._update_after_backward_, Gamma, batch.n_tokens * loss_scale)
        running.sum_for_Lambda.register_hook(after_backward)

    @torch.no_grad()
    def _update_after_backward_(self, Gamma: Tensor, n_tokens: Tensor, sum_for_Lambda: Tensor) -> None:
        """n_tokens: times the scale of the loss."""
        Lambda = self.over_ranks(sum_for_Lambda) / n_tokens.clamp(min=torch.finfo(n_tokens.dtype).tiny)
        self.update_nu_(Gamma, Lambda)
