"""The schedule at the steps where it is easy to be off by one, and what the optimizer is given."""

import math

import pytest

from ngpt_train.config.sections.optim import OptimConfig, ScheduleConfig
from ngpt_train.models import build_model
from ngpt_train.optim.fused_adam import FusedAdam
from ngpt_train.optim.optimizer import build_optimizer
from ngpt_train.optim.schedule import lr_at
from tests.properties.architectures import ARCHITECTURES, SMALL, config

PEAK = 0.8
COSINE_LAST = (1 + math.cos(math.pi * 99 / 100)) / 2


@pytest.mark.parametrize(
    ("kind", "warmup_steps", "final_lr", "steps", "shares"),
    [
        # Share of the way from final_lr to the peak, by step, after the warmup.
        ("cosine", 10, 0.0, 110, {10: 1.0, 35: (1 + math.sqrt(0.5)) / 2, 60: 0.5, 109: COSINE_LAST, 110: 0.0}),
        ("cosine", 10, 0.2, 110, {10: 1.0, 60: 0.5, 109: COSINE_LAST, 110: 0.0}),
        ("cosine", 0, 0.0, 100, {0: 1.0, 50: 0.5, 99: COSINE_LAST}),
        ("linear", 10, 0.0, 110, {10: 1.0, 11: 0.99, 60: 0.5, 109: 0.01, 110: 0.0}),
        ("linear", 10, 0.2, 110, {10: 1.0, 60: 0.5, 109: 0.01, 110: 0.0}),
        ("linear", 0, 0.0, 100, {0: 1.0, 1: 0.99, 99: 0.01}),
        # The last 20 % of 110 steps are 22, whatever the warmup.
        ("wsd", 10, 0.0, 110, {10: 1.0, 60: 1.0, 88: 1.0, 89: 21 / 22, 99: 0.5, 109: 1 / 22, 110: 0.0}),
        ("wsd", 10, 0.2, 110, {10: 1.0, 60: 1.0, 88: 1.0, 99: 0.5, 109: 1 / 22, 110: 0.0}),
        ("wsd", 0, 0.0, 110, {0: 1.0, 88: 1.0, 89: 21 / 22, 109: 1 / 22}),
        # A decay that would begin within the warmup begins at its end, at the peak.
        ("wsd", 9, 0.2, 10, {9: 1.0, 10: 0.0}),
        ("wsd", 100, 0.0, 110, {100: 1.0, 101: 0.9, 105: 0.5, 109: 0.1}),
        ("cosine", 5, 0.2, 5, {5: 1.0}),  # nothing but warmup
        ("constant", 10, 0.0, 110, {10: 1.0, 60: 1.0, 109: 1.0}),
        # No jump after the warmup; without one it is as after one step.
        ("inverse_sqrt", 4, 0.0, 110, {4: math.sqrt(4 / 5), 15: 0.5, 99: 0.2}),
        ("inverse_sqrt", 0, 0.0, 110, {0: 1.0, 3: 0.5, 99: 0.1}),
    ],
)
def test_schedule(kind: str, warmup_steps: int, final_lr: float, steps: int, shares: dict[int, float]) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup_steps, final_lr=final_lr)
    for step, share in shares.items():
        expected = final_lr + (PEAK - final_lr) * share
        assert lr_at(step, schedule, PEAK, steps) == pytest.approx(expected, rel=1e-12, abs=1e-15), f"step {step}"
    for step in range(warmup_steps):  # from 0, not from final_lr
        assert lr_at(step, schedule, PEAK, steps) == pytest.approx(PEAK * (step + 1) / warmup_steps, rel=1e-12)


def test_ramps_of_the_normformer_paper() -> None:
    """Figure 5: 5e-5 more at each step. Table 8: from 0 to 0.1 in 1,000 steps."""
    ramp = ScheduleConfig(kind="ramp", warmup_steps=0)
    assert [lr_at(step, ramp, 0.5, 10_000) for step in (0, 1, 99)] == pytest.approx([5e-5, 1e-4, 5e-3], rel=1e-12)
    assert [lr_at(step, ramp, 0.1, 1000) for step in (0, 93, 999)] == pytest.approx([1e-4, 9.4e-3, 0.1], rel=1e-12)


@pytest.mark.parametrize("optimizer_name", ["adam", "adamw"])
@pytest.mark.parametrize("name", ["gpt+qk_norm", "ngpt"])
def test_optimizer(name: str, optimizer_name: str) -> None:
    model = build_model(config(ARCHITECTURES[name], SMALL))
    decay = 0.3 if optimizer_name == "adamw" else 0.0
    chosen = OptimConfig(name=optimizer_name, betas=[0.8, 0.9], eps=1e-6, weight_decay=decay)
    optimizer = build_optimizer(model, model.parameter_groups(), chosen)
    assert type(optimizer) is FusedAdam
    assert optimizer.defaults["decoupled_weight_decay"] == (optimizer_name == "adamw")
    held = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(held), "a parameter is held twice"
    expected = {id(p): decay if name != "ngpt" and p.ndim == 2 else 0.0 for p in model.parameters()}
    assert held == expected
    for group in optimizer.param_groups:
        assert group["fused"] is True
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
