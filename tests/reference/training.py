"""A training run in twenty lines: loss over all tokens of the step, clipping, Adam, schedule, projection."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.attention import loss_sum

Batch = tuple[Tensor, Tensor]


@dataclass
class Recipe:
    steps: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float
    warmup_steps: int


def learning_rate(recipe: Recipe, t: int) -> float:
    """lr of step t, counted from 0: linear up to the peak in W steps, then half a cosine down to 0."""
    w = recipe.warmup_steps
    if t < w:
        return recipe.lr * (t + 1) / w
    return recipe.lr * (1 + math.cos(math.pi * (t - w) / (recipe.steps - w))) / 2


def train(
    forward: Callable[[dict[str, Tensor], Tensor], Tensor],
    project: Callable[[dict[str, Tensor]], None],
    weights: dict[str, Tensor],
    batches: Sequence[Sequence[Batch]],
    recipe: Recipe,
) -> list[tuple[float, float]]:
    """Train `weights` in place, one list of micro batches a step; (loss, gradient norm before clipping) of each."""
    names = list(weights)
    moment1 = {name: torch.zeros_like(x) for name, x in weights.items()}
    moment2 = {name: torch.zeros_like(x) for name, x in weights.items()}
    history = []
    for t, micro_batches in enumerate(batches):
        n_tokens = sum(int((targets != -100).sum()) for _, targets in micro_batches)
        for x in weights.values():
            x.requires_grad_()
        total = torch.stack([loss_sum(forward(weights, x), y) for x, y in micro_batches]).sum()
        loss = total / n_tokens
        gradients = dict(zip(names, torch.autograd.grad(loss, list(weights.values())), strict=True))
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
        history.append((loss.item(), norm))

        factor = min(1.0, recipe.clip_norm / norm)
        lr = learning_rate(recipe, t)
        with torch.no_grad():
            for name, x in weights.items():
                x.requires_grad_(False)
                g = gradients[name] * factor
                m = moment1[name].mul_(recipe.beta1).add_((1 - recipe.beta1) * g)
                v = moment2[name].mul_(recipe.beta2).add_((1 - recipe.beta2) * g * g)
                m_hat = m / (1 - recipe.beta1 ** (t + 1))
                v_hat = v / (1 - recipe.beta2 ** (t + 1))
                if x.ndim == 2:
                    x.mul_(1 - lr * recipe.weight_decay)
                x.sub_(lr * m_hat / (v_hat.sqrt() + recipe.eps))
        project(weights)
    return history
