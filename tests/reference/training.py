"""A training run in twenty lines: loss over all tokens of the step, clipping, Adam, schedule, projection."""

import math
from collections.abc import Callable, Mapping, Sequence
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
    final_share: float = 0.0  # of lr, at which the cosine ends


def learning_rate(recipe: Recipe, t: int) -> float:
    """lr of step t, counted from 0: linear up to the peak in W steps, then half a cosine down to its end."""
    w = recipe.warmup_steps
    if t < w:
        return recipe.lr * (t + 1) / w
    end = recipe.final_share * recipe.lr
    return end + (recipe.lr - end) * (1 + math.cos(math.pi * (t - w) / (recipe.steps - w))) / 2


def nugpt_rates(names: Sequence[str], m: float, horizon: float) -> dict[str, float]:
    """nuGPT's rates of weights by their names, relative to the global one: arXiv 2604.27077, Table 1, second-hand.

    m: width by that of the reference; horizon: steps by those of the reference.
    """
    rates = {}
    for name in names:
        last = name.split(".")[-1]
        if last == "embedding":
            rates[name] = m**-0.5 / horizon ** (1 / 3)
        elif last == "output":
            rates[name] = 0.5 * m**-0.75 / horizon ** (1 / 3)
        elif last.startswith("w"):
            rates[name] = m**-0.75 / horizon ** (1 / 3)
        else:  # a scale vector
            rates[name] = 1 / horizon ** (1 / 3)
    return rates


def train(
    forward: Callable[[dict[str, Tensor], Tensor], Tensor],
    project: Callable[[dict[str, Tensor]], None],
    weights: dict[str, Tensor],
    batches: Sequence[Sequence[Batch]],
    recipe: Recipe,
    rates: Mapping[str, float] | None = None,
    move: Callable[[str, Tensor, Tensor, float], bool] = lambda *_: False,
) -> list[tuple[float, float]]:
    """Train `weights` in place, one list of micro batches a step; (loss, gradient norm before clipping) of each.

    rates: of each weight, relative to the learning rate; all 1 without it. move: takes the step of a weight (name,
    weight, gradient, rate), or leaves it to Adam and returns False.
    """
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
        with torch.no_grad():
            for name, x in weights.items():
                lr = learning_rate(recipe, t) * (rates or {}).get(name, 1.0)
                x.requires_grad_(False)
                g = gradients[name] * factor
                if move(name, x, g, lr):
                    continue
                m = moment1[name].mul_(recipe.beta1).add_((1 - recipe.beta1) * g)
                v = moment2[name].mul_(recipe.beta2).add_((1 - recipe.beta2) * g * g)
                m_hat = m / (1 - recipe.beta1 ** (t + 1))
                v_hat = v / (1 - recipe.beta2 ** (t + 1))
                if x.ndim == 2:
                    x.mul_(1 - lr * recipe.weight_decay)
                x.sub_(lr * m_hat / (v_hat.sqrt() + recipe.eps))
        project(weights)
    return history
