"""The numbers of a telemetry record once more, in fp64 and by their definitions in docs/telemetry.md."""

import math
import re

import torch
from torch import Tensor

Weights = dict[str, Tensor]  # whole, by canonical name


def layer_of(name: str) -> str | None:
    found = re.match(r"(layers|encoder)\.(\d+)\.", name)
    return f"{found[1]}.{found[2]}" if found else None


def changes(before: Weights, after: Weights, gradients: Weights) -> dict[str, float]:
    """Norms of gradients, weights and updates, and the angles that rows of matrices turn."""
    found: dict[str, float] = {}
    groups = {name: [name] for name in before}
    for name in before:
        if layer := layer_of(name):
            groups.setdefault(layer, []).append(name)
    for group, names in groups.items():
        gradient, old, new = (
            torch.cat([x[name].double().flatten() for name in names]) for x in (gradients, before, after)
        )
        found[f"grad_l1/{group}"] = float(gradient.abs().sum())
        found[f"grad_l2/{group}"] = float(gradient.square().sum().sqrt())
        found[f"weight_l2/{group}"] = float(new.square().sum().sqrt())
        length = float(old.square().sum().sqrt())
        found[f"update_ratio/{group}"] = float((new - old).square().sum().sqrt()) / length if length else math.nan
    for group, names in groups.items():
        rows = [angle(before[name].double(), after[name].double()) for name in names if before[name].ndim == 2]
        if rows:
            angles = torch.cat(rows)
            found[f"angle_mean/{group}"], found[f"angle_max/{group}"] = float(angles.mean()), float(angles.max())
    return found


def angle(u: Tensor, v: Tensor) -> Tensor:
    """Between the rows of u and v, by the parts of v along and across u."""
    u = u / u.norm(dim=-1, keepdim=True)
    along = (u * v).sum(-1, keepdim=True)
    return torch.atan2((v - along * u).norm(dim=-1), along.squeeze(-1))


def attention(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> tuple[float, int, int]:
    """The largest logit, the saturated rows and all rows; q `(H, T, D)`, k `(H, S, D)`, seen `(T, S)`.

    A query that sees no key, or one, has no row.
    """
    largest, saturated, rows = -math.inf, 0, 0
    for head in range(len(q)):
        logits = scale * q[head].double() @ k[head].double().T
        for t in range(len(logits)):
            visible = logits[t][seen[t]]
            if len(visible):
                largest = max(largest, float(visible.max()))
            if len(visible) > 1:
                rows += 1
                saturated += float(visible.softmax(0).max()) > 0.99
    return largest, saturated, rows
