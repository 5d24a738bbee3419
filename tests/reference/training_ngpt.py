"""A training run of nGPT with the four parts of "Training nGPT" (arXiv 2608.01284, second-hand), from its formulas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.attention import loss_sum
from tests.reference.ngpt import normalize, project


@dataclass
class Parts:
    q: float
    rho: float
    gate_power: float
    gate_eps: float
    angle_cap: float


def log_rate(lr: float, t: int, warmup: int, steps: int, rho: float) -> float:
    """Linear up to lr, then down to 0: eta = lr (1 - log(1 + r / rho) / log(1 + 1 / rho))."""
    if t < warmup:
        return lr * (t + 1) / warmup
    r = (t - warmup) / (steps - warmup)
    return lr * (1 - math.log(1 + r / rho) / math.log(1 + 1 / rho))


def preconditioned(
    forward: Callable[[dict[str, Tensor], Tensor], Tensor],
    weights: dict[str, Tensor],
    batch: tuple[Tensor, Tensor],
    factor: float,
    q: float,
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss, and the gradients with dL/du = (s_z / mean s_z)^q dL/dz. factor: s_z in use by the stored one."""
    tokens, targets = batch
    others = {name: x.requires_grad_() for name, x in weights.items() if name != "s_z"}
    u = forward(others | {"s_z": torch.full_like(weights["s_z"], 1 / factor)}, tokens)
    s_z = factor * weights["s_z"]
    z = (s_z * u).detach().requires_grad_()
    loss = loss_sum(z, targets) / (targets != -100).sum()
    (dz,) = torch.autograd.grad(loss, z)
    du = (s_z / s_z.mean()) ** q * dz
    found = dict(zip(others, torch.autograd.grad(u, list(others.values()), du), strict=True))
    for x in others.values():
        x.requires_grad_(False)
    return loss.item(), found | {"s_z": factor * (u.detach() * dz).sum((0, 1))}


def train(
    forward: Callable[[dict[str, Tensor], Tensor], Tensor],
    weights: dict[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    parts: Parts,
    rates: Sequence[float],
    factor: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-16,
) -> tuple[list[float], int, int]:
    """Trains fp64 `weights` in place, without clipping: the losses; the number of rows' steps that the cap shortened,
    and of all."""
    m = {name: torch.zeros_like(x) for name, x in weights.items()}
    v = {name: torch.zeros_like(x) for name, x in weights.items()}
    losses, n_capped, n_rows = [], 0, 0
    for t, (batch, lr) in enumerate(zip(batches, rates, strict=True), start=1):
        loss, gradients = preconditioned(forward, weights, batch, factor, parts.q)
        losses.append(loss)
        for name, w in weights.items():
            g = gradients[name]
            m[name] = betas[0] * m[name] + (1 - betas[0]) * g
            v[name] = betas[1] * v[name] + (1 - betas[1]) * g * g
            d = (v[name] / (1 - betas[1] ** t)).sqrt() + eps
            gamma = d**parts.gate_power / (d**parts.gate_power + parts.gate_eps**parts.gate_power)
            moved = w - lr * gamma * m[name] / (1 - betas[0] ** t) / d
            if w.ndim == 2 and name not in ("embedding", "output"):
                c = (w * moved).sum(1, keepdim=True)
                u = moved - c * w
                phi = torch.atan2(u.norm(dim=1, keepdim=True), c)
                theta = torch.full_like(phi, parts.angle_cap)
                moved = torch.where(phi > theta, theta.cos() * w + theta.sin() * normalize(u), moved)
                n_capped, n_rows = n_capped + int((phi > theta).sum()), n_rows + len(w)
            w.copy_(moved)
        project(weights)
    return losses, n_capped, n_rows
