"""The decorators that swap in what computes a formula faster, or say that nothing does."""

import pytest
import torch
from torch import Tensor

from ngpt_train.core import log
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.operation import operation, without_kernel


def plain(x: Tensor, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
    return factor * x if bias is None else factor * x + bias


def twin(on_triton: bool, x: Tensor, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
    return plain(x, factor, bias) + (1000 if on_triton else 100)


def positive(x: Tensor, *_: object, **__: object) -> bool:
    return bool((x > 0).all())


def far(x: Tensor, *_: object, **__: object) -> str | None:
    return "what is far" if x.numel() > 5 else None


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
    shift.twin(twin)
    shift.by_hand_where(lambda x, *_, **__: x.stride(0) == 1)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: shift(x, factor=2.0), backend="eager", fullgraph=True, dynamic=False)
    # By hand where elements lie side by side.
    given = torch.full((3,), x) if x > 0 else torch.full((6,), x)[::2]
    with dispatch.chosen(kernels, without):
        assert shift(given, 2.0).tolist() == compiled(given).tolist() == [expected] * 3
    with dispatch.chosen("torch"):
        assert compiled(given).tolist() == [102.0 if x > 0 else -2.0] * 3
    assert shift.formula is plain


def test_arguments_are_checked_first() -> None:
    """Caught: a twin that has run when the error is raised; keywords lost on the way."""

    def check(x: Tensor, *_: object, **__: object) -> None:
        if x.ndim != 1:
            raise ValueError("one dimension")

    shift = operation(None)(plain)
    shift.twin(lambda *_, **__: pytest.fail("ran"))
    shift.check(check)
    with pytest.raises(ValueError, match="one dimension"):
        shift(torch.zeros(2, 2))
    told = operation("shift")(plain)
    told.twin(twin)
    assert told(x=torch.ones(1), bias=torch.ones(1)).item() == 102.0


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_what_the_log_says(kernels: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only where a kernel would have run. Caught: a line for each call, one for whoever asked for none."""
    monkeypatch.setattr(log, "_said", set())
    caplog.set_level("WARNING", "ngpt_train")
    shift = operation("shift")(plain)
    shift.twin(twin)
    shift.unsupported(far)
    other = without_kernel("scale", "model.scale=other")(plain)
    maybe = without_kernel("maybe", far)(plain)
    ids = without_kernel("ids", "model.ids=true")(lambda pair, x: x)
    with dispatch.chosen(kernels):
        for _ in range(2):
            assert [float(f(torch.ones(6))[0]) for f in (shift, other, maybe)] == [101.0, 1.0, 1.0]
            assert maybe(torch.ones(2)).tolist() == [1.0, 1.0]
            ids((torch.ones(1), torch.ones(1, dtype=torch.int64)), torch.ones(1))
    because = "runs in plain PyTorch, because its kernel does not know"
    expected = [("shift", "what is far"), ("scale", "model.scale=other"), ("maybe", "what is far")]
    lines = [f"kernels: {name} {because} {what}" for name, what in [*expected, ("ids", "model.ids=true")]]
    assert [record.message for record in caplog.records] == (lines if kernels == "triton" else [])
