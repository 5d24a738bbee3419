"""The decorators that run a twin in place of a formula, or log that there is no kernel."""

import logging

import pytest
import torch
from torch import Tensor

from ngpt_train.core import log
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.dispatch import operation


def plain(x: Tensor, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
    return factor * x if bias is None else factor * x + bias


def twin(on_triton: bool, x: Tensor, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
    return plain(x, factor, bias) + (1000 if on_triton else 100)


def far(x: Tensor, *_: object, **__: object) -> str | None:
    return "far shifts" if x.numel() > 5 else None


@pytest.mark.parametrize(
    ("kernels", "without", "x", "expected"),
    [
        ("triton", None, 1.0, 1002.0),
        ("triton", "shift", 1.0, 102.0),
        ("triton", "swiglu", 1.0, 1002.0),
        ("torch", None, 1.0, 102.0),
        ("torch", None, -1.0, -2.0),
        ("triton", None, -1.0, 998.0),
        ("auto", None, -1.0, -2.0),
    ],
)
def test_what_runs(kernels: str, without: str | None, x: float, expected: float) -> None:
    """Eager and compiled without a break of the graph. Caught: a twin where the formula is better, one left out, the
    choice of before in compiled code."""
    shift = operation("shift")(plain)

    @shift.twin
    def by_hand_where_elements_lie_side_by_side(on_triton: bool, x: Tensor, *args: float, **kwargs: float) -> Tensor:
        chosen = twin if on_triton or x.stride(0) == 1 else lambda _, *args, **kwargs: shift.formula(*args, **kwargs)
        return chosen(on_triton, x, *args, **kwargs)

    torch.compiler.reset()
    compiled = torch.compile(lambda x: shift(x, factor=2.0), backend="eager", fullgraph=True, dynamic=False)
    given = torch.full((3,), x) if x > 0 else torch.full((6,), x)[::2]
    with dispatch.chosen(kernels, without):
        assert shift(given, 2.0).tolist() == compiled(given).tolist() == [expected] * 3
    with dispatch.chosen("torch"):
        assert compiled(given).tolist() == [102.0 if x > 0 else -2.0] * 3
    assert shift.formula is plain


def test_a_line_of_traced_code(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a break of the graph at each line."""
    monkeypatch.setattr(log, "_said", set())

    def said(x: Tensor) -> Tensor:
        log.say_once(logging.WARNING, "no kernel")
        return x + 1

    assert torch.compile(said, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2
    assert caplog.messages.count("no kernel") == 1


def test_arguments_by_name() -> None:
    """Caught: keywords lost on the way."""
    told = operation("shift")(plain)
    told.twin(twin)
    assert told(x=torch.ones(1), bias=torch.ones(1)).item() == 102.0


@pytest.mark.parametrize("kernels", ["triton", "torch", "auto"])
def test_what_the_log_says(kernels: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only where a kernel would have run. Caught: a line for each call, one for whoever asked for none."""
    monkeypatch.setattr(log, "_said", set())
    caplog.set_level("WARNING", "ngpt_train")
    shift = operation("shift")(plain)
    shift.twin(twin)
    shift.unsupported(far)
    with dispatch.chosen(kernels):
        for _ in range(2):
            assert float(shift(torch.ones(6))[0]) == 101.0
            dispatch.say_without_kernel("scale", "model.scale=other", torch.ones(1))
    because = "runs in plain PyTorch, because its kernel does not know"
    expected = [("shift", "far shifts"), ("scale", "model.scale=other")]
    lines = [f"kernels: {name} {because} {what}" for name, what in expected]
    assert [record.message for record in caplog.records] == (lines if kernels == "triton" else [])
