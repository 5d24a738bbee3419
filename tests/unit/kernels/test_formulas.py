"""The formulas are what kernels=torch trains with."""

from collections.abc import Callable
from typing import Any

import pytest

from ngpt_train.kernels import cross_entropy, rotary, sphere_step, swiglu
from ngpt_train.kernels.dispatch import chosen
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

OPERATIONS = [sphere_step.sphere_step, rotary.rotary, swiglu.swiglu, cross_entropy.linear_cross_entropy]
RECIPE = Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_runs_the_formulas(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a formula that only tests run."""
    called = set()

    def noted(name: str, formula: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return formula(*arguments, **options)

        return run

    for operation in OPERATIONS:
        monkeypatch.setattr(operation, "formula", noted(operation.name, operation.formula))
    options = ["kernels=torch", f"train.precision={precision}"]
    with chosen("torch"):
        state = build_state(run_config("ngpt", SMALL, RECIPE, rows=4, context=16, micro_rows=4, options=options))
        train_step(state, [text_like_rows(4, 16, SMALL.vocab_size, seed=0)])
    assert called == {"sphere_step", "rotary", "swiglu"}  # the loss takes its tokens in chunks
