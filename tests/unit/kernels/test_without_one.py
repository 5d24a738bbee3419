"""One kernel is left out, as a benchmark of its worth does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from benchmarks import paper_steps
from benchmarks.paper_steps import OPERATIONS, Variant, make_config
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.gpu import adam, cross_entropy, rotary, sphere_step, swiglu
from ngpt_train.optim.row_adam import RowAdam
from ngpt_train.training import build_state

KERNELS = {
    "sphere_step": [(sphere_step, "sphere_step_forward"), (sphere_step, "sphere_step_backward")],
    "swiglu": [(swiglu, "swiglu_forward"), (swiglu, "swiglu_backward")],
    "rotary": [(rotary, "rotary_forward"), (rotary, "rotary_backward")],
    "linear_cross_entropy": [(cross_entropy, "cross_entropy_")],
    "adam": [(adam, "adam_rows_")],
}


@pytest.mark.slow
def test_a_step_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a name that leaves out nothing, or another kernel too; Adam's moments lost."""
    monkeypatch.setitem(paper_steps.SIZES, "debug", (16, 1, 1, 32, 48))  # the interpreter is slow
    called = set()

    def seen(name: str, run: Any, *given: Any, **more: Any) -> Any:
        called.add(name)
        return run(*given, **more)

    for name, functions in KERNELS.items():
        for module, function in functions:
            monkeypatch.setattr(module, function, partial(seen, name, getattr(module, function)))
    assert set(KERNELS) == set(OPERATIONS)
    config = make_config("ngpt", "debug:8", "cpu")
    config.train.batch_rows, config.kernels.kind = 1, "triton"
    before = dispatch._choice
    with dispatch.chosen("triton"):
        full = Variant(build_state(config), "triton")
        full()
        assert called == set(OPERATIONS)
        for operation in OPERATIONS:
            called.clear()
            ablated = full.changed("triton", operation)
            ablated()
            assert called == set(OPERATIONS) - {operation}
            assert ablated.state.model is full.state.model
            assert isinstance(ablated.state.optimizer, RowAdam) == (operation != "adam")
    assert max((p.norm(dim=-1) - 1).abs().max() for p in full.state.model.parameters() if p.ndim == 2) < 1e-5
    assert (dispatch._choice, dispatch._off) == (before, {})


def test_what_is_compiled_follows() -> None:
    """Caught: compiled code that keeps the first choice, so that a benchmark compares a kernel with itself; code that
    is compiled again for a choice that it does not depend on."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x + 1 if dispatch.runs_on_triton("swiglu", x) else x - 1
        return 2 * x if dispatch.runs_on_triton("rotary", x) else 3 * x

    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, dynamic=False)
    for _ in range(2):
        for without, expected in ((None, 2), ("swiglu", -2), ("rotary", 3), ("adam", 2)):
            with dispatch.chosen("triton", without):
                assert compiled(torch.zeros(1)).item() == expected
        with dispatch.chosen("torch"):
            assert compiled(torch.zeros(1)).item() == -3
    assert counter.frame_count == 4
