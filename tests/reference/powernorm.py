"""PowerNorm, PN-V and BatchNorm (Shen et al. 2020), as the `norms` of the decoder in reference/composed.py.

A norm sees x as (N, C): N tokens, C channels. Its statistics are over the valid tokens; an invalid token is normalised
like any other, but it counts in no statistic, and no gradient comes from it or goes to it.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.reference import gpt

Gradients = tuple[Tensor, Tensor, Tensor]  # of x, gain and bias


def mean_over(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of the valid rows of `x` (N, C). There is always at least one."""
    return (x if valid is None else x[valid]).mean(0)


def without_invalid(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else torch.where(valid[:, None], x, 0)


class PNV:
    """PN-V, eqs. 4-6; psi2 is a running statistic for evaluation."""

    def __init__(self, channels: int, *, alpha_fwd: float = 0.9, eps: float = 1e-5) -> None:
        self.alpha_fwd, self.eps = alpha_fwd, eps
        self.psi2 = torch.ones(channels, dtype=torch.float64)
        self.saved: Any = None

    def forward(
        self, x: Tensor, gain: Tensor, bias: Tensor, valid: Tensor | None = None, warmup: bool = False
    ) -> Tensor:
        psi2_batch = mean_over(x * x, valid)
        psi = torch.sqrt(psi2_batch + self.eps)
        x_hat = x / psi  # eq. 4
        self.psi2 = self.alpha_fwd * self.psi2 + (1 - self.alpha_fwd) * psi2_batch
        self.saved = x_hat, psi, gain, valid
        return gain * x_hat + bias  # eq. 5

    def backward(self, dy: Tensor, loss_scale: float = 1.0, saved: Any = None) -> Gradients:
        """Gradients of the forward whose `saved` this is, else of the last. `loss_scale` does not matter."""
        x_hat, psi, gain, valid = self.saved if saved is None else saved
        dy = without_invalid(dy, valid)
        g = gain * dy
        dx = (g - mean_over(g * x_hat, valid) * x_hat) / psi  # eq. 6
        return without_invalid(dx, valid), without_invalid(dy * x_hat, valid).sum(0), dy.sum(0)

    def evaluate(self, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return gain * x / torch.sqrt(self.psi2 + self.eps) + bias


class BatchNorm:
    """Algorithm 1. The variance is the biased one, in the running statistic too."""

    def __init__(self, channels: int, *, alpha_fwd: float = 0.9, eps: float = 1e-5) -> None:
        self.alpha_fwd, self.eps = alpha_fwd, eps
        self.mean = torch.zeros(channels, dtype=torch.float64)
        self.variance = torch.ones(channels, dtype=torch.float64)
        self.saved: Any = None

    def forward(
        self, x: Tensor, gain: Tensor, bias: Tensor, valid: Tensor | None = None, warmup: bool = False
    ) -> Tensor:
        mean = mean_over(x, valid)
        variance = mean_over((x - mean) ** 2, valid)
        sigma = torch.sqrt(variance + self.eps)
        x_hat = (x - mean) / sigma  # eq. 1
        self.mean = self.alpha_fwd * self.mean + (1 - self.alpha_fwd) * mean
        self.variance = self.alpha_fwd * self.variance + (1 - self.alpha_fwd) * variance
        self.saved = x_hat, sigma, gain, valid
        return gain * x_hat + bias  # eq. 2

    def backward(self, dy: Tensor, loss_scale: float = 1.0, saved: Any = None) -> Gradients:
        """Gradients of the forward whose `saved` this is, else of the last. `loss_scale` does not matter."""
        x_hat, sigma, gain, valid = self.saved if saved is None else saved
        dy = without_invalid(dy, valid)
        g = gain * dy
        dx = (g - mean_over(g, valid) - mean_over(g * x_hat, valid) * x_hat) / sigma  # eq. 3
        return without_invalid(dx, valid), without_invalid(dy * x_hat, valid).sum(0), dy.sum(0)

    def evaluate(self, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return gain * (x - self.mean) / torch.sqrt(self.variance + self.eps) + bias


class PN:
    """PowerNorm, Algorithm 2, with the warm-up of psi.

    In a forward of the warm-up the batch's psi normalises, and the running psi^2 becomes the mean of the batches' psi^2
    so far; the backward takes psi for a constant as ever. nu is in units of the gradient of the summed loss: with
    `loss_scale` s the gradient dy that arrives is s times that of the sum.
    """

    def __init__(self, channels: int, *, alpha_fwd: float = 0.9, alpha_bkw: float = 0.9, eps: float = 1e-5) -> None:
        self.alpha_fwd, self.alpha_bkw, self.eps = alpha_fwd, alpha_bkw, eps
        self.psi2 = torch.ones(channels, dtype=torch.float64)
        self.nu = torch.zeros(channels, dtype=torch.float64)
        self.warmup_psi2: list[Tensor] = []
        self.saved: Any = None

    def forward(
        self, x: Tensor, gain: Tensor, bias: Tensor, valid: Tensor | None = None, warmup: bool = False
    ) -> Tensor:
        psi2_batch = mean_over(x * x, valid)
        psi = torch.sqrt((psi2_batch if warmup else self.psi2) + self.eps)
        x_hat = x / psi  # eq. 8
        if warmup:
            self.warmup_psi2.append(psi2_batch)
            self.psi2 = torch.stack(self.warmup_psi2).mean(0)
        else:
            self.psi2 = self.alpha_fwd * self.psi2 + (1 - self.alpha_fwd) * psi2_batch  # eq. 10
        self.saved = x_hat, psi, gain, valid
        return gain * x_hat + bias  # eq. 9

    def backward(self, dy: Tensor, loss_scale: float = 1.0, saved: Any = None) -> Gradients:
        """Gradients of the forward whose `saved` this is, else of the last; nu makes a step."""
        x_hat, psi, gain, valid = self.saved if saved is None else saved
        dy = without_invalid(dy, valid)
        g = gain * dy
        dx = (g - loss_scale * self.nu * x_hat) / psi  # eqs. 11 and 12
        gamma = mean_over(x_hat * x_hat, valid)
        lamda = mean_over(g * x_hat, valid) / loss_scale
        self.nu = self.nu * (1 - (1 - self.alpha_bkw) * gamma) + (1 - self.alpha_bkw) * lamda  # eq. 13
        return without_invalid(dx, valid), without_invalid(dy * x_hat, valid).sum(0), dy.sum(0)

    def evaluate(self, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return gain * x / torch.sqrt(self.psi2 + self.eps) + bias


Norm = PN | PNV | BatchNorm


class Differentiable(torch.autograd.Function):
    """A norm's own forward and backward inside autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        bias: Tensor,
        norm: Norm,
        valid: Tensor | None,
        warmup: bool,
        loss_scale: float,
    ) -> Tensor:
        y = norm.forward(x, gain, bias, valid, warmup)
        ctx.norm, ctx.loss_scale, ctx.saved = norm, loss_scale, norm.saved
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.norm.backward(dy, ctx.loss_scale, ctx.saved), None, None, None, None


def group_scaling(x: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """Each of the token's groups of neighbouring channels to a quadratic mean of 1; 0 groups: x as it is."""
    if groups == 0:
        return x
    g = x.unflatten(-1, (groups, -1))
    return (g / torch.sqrt((g * g).mean(-1, keepdim=True) + eps)).flatten(-2)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * gain + bias


# The decoder. A place is where a norm stands: `layers.{i}.norm_attn`, `layers.{i}.norm_mlp` and `norm_final`. Its
# function takes x (N, C), gain and bias.
Place = Callable[[Tensor, Tensor, Tensor], Tensor]


def places(n_layers: int) -> list[str]:
    return [f"layers.{i}.{name}" for i in range(n_layers) for name in ("norm_attn", "norm_mlp")] + ["norm_final"]


def in_training(
    norms: Mapping[str, Norm],
    *,
    groups: int = 0,
    eps: float = 1e-5,
    valid: Tensor | None = None,
    warmup: bool = False,
    loss_scale: float = 1.0,
) -> dict[str, Place]:
    """Each place's function for one forward, which updates the norm's statistics. `valid`: (B, T) or (N,)."""
    mask = None if valid is None else valid.flatten()

    def run(norm: Norm, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return Differentiable.apply(group_scaling(x, groups, eps), gain, bias, norm, mask, warmup, loss_scale)

    return {place: partial(run, norm) for place, norm in norms.items()}


def in_evaluation(norms: Mapping[str, Norm], *, groups: int = 0, eps: float = 1e-5) -> dict[str, Place]:
    """Each place's function with the norm's running statistics as they are."""

    def run(norm: Norm, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return norm.evaluate(group_scaling(x, groups, eps), gain, bias)

    return {place: partial(run, norm) for place, norm in norms.items()}


def with_layer_norm(where: Iterable[str], *, groups: int = 0, eps: float = 1e-5) -> dict[str, Place]:
    def run(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(group_scaling(x, groups, eps), gain, bias, eps=eps)

    return dict.fromkeys(where, run)


def shapes(
    d: int, n_layers: int, n_heads: int, vocab: int, *, n_kv_heads: int, d_mlp: int, tied: bool = False
) -> dict[str, tuple[int, ...]]:
    table = gpt.shapes(d, n_layers, n_heads, vocab, n_kv_heads=n_kv_heads, d_mlp=d_mlp, tied=tied)
    return table | {f"{place}.bias": (d,) for place in places(n_layers)}


def random_weights(table: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """fp64 weights with every gain and bias well away from its initial 1 or 0."""
    weights = gpt.random_weights(table, seed)
    return {name: x - 1 if name.endswith(".bias") else x for name, x in weights.items()}


def n_params(model: Any) -> int:
    """The baseline's, each norm with a gain and a bias."""
    d, n_layers, ffn, vocabulary = model.d_model, model.n_layers, model.d_mlp, model.vocab_size
    embeddings = (2 - model.tied_embeddings) * vocabulary * d
    return embeddings + n_layers * (4 * d * d + 3 * d * ffn) + (2 * n_layers + 1) * 2 * d
