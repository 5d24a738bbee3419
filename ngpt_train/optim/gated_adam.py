"""GatedAdamW ("Training nGPT", arXiv 2608.01284): Adam whose eps is a gate with a sharpness of its own.

Second-hand: we know the paper from a description by others. With Adam's m_hat and v_hat, per element:

    d = sqrt(v_hat) + eps
    gamma = sigmoid(a log(d / eps_gate))      = d^a / (d^a + eps_gate^a)
    w <- w - lr (gamma m_hat / d + lambda w)

a is optim.gate_power, eps_gate is optim.gate_eps. With a = 1 the step is Adam's, lr m_hat / (sqrt(v_hat) + eps +
eps_gate). With a = 1/2 the gate is softer: it dampens steps of a d far above eps_gate too, and those of a small d less.
The paper has one more factor, alpha, beside gamma. Its value is unknown; ours is 1.
"""

from typing import Any

import torch
from torch import Tensor

from ngpt_train.models.rank_rows import local_rows
from ngpt_train.optim.fused_adam import FusedAdam


def gate(d: Tensor, power: float, gate_eps: float) -> Tensor:
    """gamma of d > 0, elementwise: 1/2 at d = gate_eps, and near 1 far above it. power: a."""
    return torch.sigmoid(power * torch.log(d / gate_eps))


class GatedAdam(FusedAdam):
    """Adam or AdamW with a gate, elementwise on parameters of any shape: under FSDP2 a rank moves its own rows. power,
    gate_eps: a and eps_gate, both above 0. options: for torch.optim.Adam."""

    def __init__(self, groups: list[dict[str, Any]], power: float, gate_eps: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.power, self.gate_eps = power, gate_eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient, and their moments. Takes no closure."""
        assert closure is None
        for group in self.param_groups:
            for *of_one, step in self.states(group, group["params"]):
                skipped = torch.zeros_like(step) if self.found_inf is None else self.found_inf
                step += 1 - skipped
                w, g, m, v = map(local_rows, of_one)
                g = g.to(w.dtype) if self.grad_scale is None else g.to(w.dtype) / self.grad_scale
                for old, moved in zip((w, m, v), self._moved(w, g, m, v, step, group), strict=True):
                    old.copy_(torch.where(skipped != 0, old, moved))

    def _moved(
        self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """w, m and v of one shape after a step with the gradient g; step: t, 0-dim."""
        beta1, beta2 = group["betas"]
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g.square()
        t = step.double()  # in fp32, 1 - beta2^t would be off by 5e-5 at the first step
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        d = v_hat.sqrt() + group["eps"]
        gamma = gate(d, self.power, self.gate_eps)
        w = w - group["lr"] * (gamma * m_hat / d + group["weight_decay"] * w)
        return w, m, v
