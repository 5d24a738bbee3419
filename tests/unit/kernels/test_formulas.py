"""The formulas are what kernels=torch trains with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ngpt_train.kernels import cross_entropy, rotary, sphere_step, swiglu
from ngpt_train.kernels.dispatch import chosen
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

OPERATIONS = {
    "sphere_step": sphere_step.sphere_step,
    "rotary": rotary.rotary,
    "swiglu": swiglu.swiglu,
    "linear_cross_entropy": cross_entropy.linear_cross_entropy,
}
TWINS = [
    sphere_step.by_hand_or_on_triton,
    rotary.by_hand_or_on_triton,
    swiglu.by_hand_or_on_triton,
    cross_entropy.in_chunks,
]
RECIPE = Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)


def losses(precision: str) -> list[float]:
    """Losses of a short training of nGPT with kernels=torch."""
    options = ["kernels=torch", f"train.precision={precision}"]
    with chosen("torch"):
        state = build_state(run_config("ngpt", SMALL, RECIPE, rows=4, context=16, micro_rows=4, options=options))
        rows = text_like_rows(4, 16, SMALL.vocab_size, seed=0)
        return [train_step(state, [rows]).loss.item() for _ in range(6)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_training_runs_the_formulas(precision: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward passes call them, and their gradients by hand train as autograd of them does. Caught: a formula that
    only tests run; a gradient of another function than the formula."""
    called = set()

    def noted(name: str, formula: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return formula(*arguments, **options)

        return run

    formulas = {name: operation.formula for name, operation in OPERATIONS.items()}
    for name, operation in OPERATIONS.items():
        monkeypatch.setattr(operation, "formula", noted(name, formulas[name]))
    by_hand = losses(precision)
    assert called == {"sphere_step", "rotary", "swiglu"}  # the loss takes its tokens in chunks
    assert by_hand[-1] < 0.95 * by_hand[0]

    for name, operation in OPERATIONS.items():
        monkeypatch.setattr(operation, "formula", formulas[name])
        operation.twin(lambda _, *given, formula=formulas[name], **options: formula(*given, **options))
    try:
        torch.testing.assert_close(torch.tensor(by_hand), torch.tensor(losses(precision)), rtol=tolerance, atol=0)
    finally:
        for operation, twin in zip(OPERATIONS.values(), TWINS, strict=True):
            operation.twin(twin)
