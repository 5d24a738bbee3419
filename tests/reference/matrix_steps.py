"""The matrix optimizers by singular values, in fp64: no iteration of matrices, no fused storage.

Of `W_o` and `W_down`, stored as (in, out), a step is on the transpose.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

HIDDEN = ("wq", "wk", "wv", "wo", "w_u", "w_v", "w_down")


def scalar_newton_schulz(s: Tensor) -> Tensor:
    """What five steps make of a singular value, relative to the Frobenius norm."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def newton_schulz(x: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ torch.diag(scalar_newton_schulz(s / s.square().sum().sqrt())) @ vh


@dataclass
class MatrixSteps:
    """Steps of one of muon, normuon, adamh, muonh. Muon's momentum is the sum mu B + G, not an average."""

    name: str
    weight_decay: float = 0.0
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr: str = "original"
    state: dict[str, list[Tensor]] = field(default_factory=dict)

    def move(self, name: str, stored: Tensor, gradient: Tensor, lr: float) -> bool:
        """A step of `stored` in place; False for a weight that takes none."""
        last = name.split(".")[-1]
        if last not in HIDDEN:
            return False
        w, g = (x.mT if last in ("wo", "w_down") else x for x in (stored, gradient))
        u = self.adam(name, g) if self.name == "adamh" else self.muon(name, g)
        if self.name.endswith("h"):
            radius = w.norm()
            moved = w - lr * radius * u / u.norm()
            moved = radius * moved / moved.norm()
        else:
            n_out, n_in = w.shape
            s = math.sqrt(max(1, n_out / n_in)) if self.adjust_lr == "original" else 0.2 * math.sqrt(max(n_out, n_in))
            moved = (1 - lr * self.weight_decay) * w - lr * s * u
        w.copy_(moved)
        return True

    def muon(self, name: str, g: Tensor) -> Tensor:
        b, v = self.state.setdefault(name, [torch.zeros_like(g), torch.zeros(len(g), 1, dtype=g.dtype)])
        b.mul_(self.momentum).add_(g)
        o = newton_schulz(g + self.momentum * b if self.nesterov else b)
        if self.name != "normuon":
            return o
        v.copy_(0.95 * v + 0.05 * (o * o).mean(1, keepdim=True))
        even = o / v.sqrt()
        return even * o.norm() / even.norm()

    def adam(self, name: str, g: Tensor) -> Tensor:
        m, v, t = self.state.setdefault(name, [torch.zeros_like(g), torch.zeros_like(g), torch.zeros(())])
        t += 1
        m.mul_(0.9).add_(0.1 * g)
        v.mul_(0.95).add_(0.05 * g * g)
        return (m / (1 - 0.9 ** t.item())) / ((v / (1 - 0.95 ** t.item())).sqrt() + 1e-8)
