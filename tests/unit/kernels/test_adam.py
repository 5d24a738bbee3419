"""The Adam kernel, and torch's fused steps in its place, against the formula in fp64; the bytes that it claims."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from ngpt_train.kernels import dispatch
from ngpt_train.kernels.adam import WIDEST, adam_rows_
from ngpt_train.kernels.gpu import adam as gpu
from tests.unit.kernels.looks import error

# Short rows share a program, and the last program is not full; odd lengths leave masked columns.
SHAPES = [(1, 64), (37, 64), (21, 50), (5, 1000), (3, 1024), (2, 1280), (1, 1), (2, 3001)]
shapes = pytest.mark.parametrize(("rows", "d"), SHAPES, ids=[f"{rows}x{d}" for rows, d in SHAPES])
OPTIONS = {"lr": 3e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "weight_decay": 0.3, "constraint": "sphere"}
State = dict[str, Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 7.0  # value of the memory around a step's tensors


@pytest.fixture(autouse=True)
def on_triton() -> Iterator[None]:
    with dispatch.chosen("triton"), torch.device(DEVICE):
        yield


def matrix(rows: int, d: int, seed: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, d, generator=draw, device="cpu").to(DEVICE)


def started(rows: int, d: int) -> State:
    """In the middle of a run: rows off the sphere, moments that are not 0."""
    return {
        "weight": matrix(rows, d, 0, 2 / math.sqrt(d)),
        "exp_avg": matrix(rows, d, 1, 0.01),
        "exp_avg_sq": matrix(rows, d, 2, 0.02).square(),
    }


def formula(
    state: State, gradient: Tensor, step: int, scale: float | None, *, lr, beta1, beta2, eps, weight_decay, constraint
) -> State:
    """The docstring's lines, in fp64."""
    w, m, v = (state[name].double() for name in ("weight", "exp_avg", "exp_avg_sq"))
    g = gradient.double() / (1.0 if scale is None else scale)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    w = w - lr * weight_decay * w
    w = w - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    if constraint != "free":
        w = w / w.norm(dim=1, keepdim=True).clamp(min={"sphere": 1e-12, "ball": 1.0}[constraint])
    return {"weight": w, "exp_avg": m, "exp_avg_sq": v}


def moved(
    state: State, gradient: Tensor, step: int, scale: float | None = None, run: Any = adam_rows_, **options: Any
) -> State:
    """A copy of `state` after the step, which has written nowhere else."""
    margins = {name: x.new_full((32, x.shape[1]), MARGIN) for name, x in state.items()}
    buffers = {name: torch.cat([margins[name], x, margins[name]]) for name, x in state.items()}
    state = {name: x[32:-32] for name, x in buffers.items()}
    number = torch.tensor(float(step))
    grad_scale = None if scale is None else torch.tensor(scale)
    run(gradient=gradient, step=number, grad_scale=grad_scale, **{"found_inf": None} | state | options)
    assert number == step, "who calls counts the steps"
    assert all((x[:32] == MARGIN).all() and (x[-32:] == MARGIN).all() for x in buffers.values())
    return state


@pytest.mark.parametrize("step", [1, 500])
def test_the_body_is_the_formula(step: int) -> None:
    """Caught: the same as of the kernel, in what benchmarks take as its reference."""
    state, gradient = started(5, 1000), matrix(5, 1000, 3, 0.05)  # small weights, so that an error of a move shows
    state["copy"] = torch.full((5, 1000), torch.nan, dtype=torch.bfloat16)
    actual = moved(state, gradient, step, 1.7, adam_rows_.formula, **OPTIONS)
    for name, x in formula(state, gradient, step, 1.7, **OPTIONS).items():
        assert error(actual[name], x) <= 1e-6, name
    assert torch.equal(actual["copy"], actual["weight"].bfloat16())
    unmoved = moved(state, gradient, step, 1.7, adam_rows_.formula, found_inf=torch.ones(()), **OPTIONS)
    assert all(torch.equal(unmoved[name], x) for name, x in state.items() if name != "copy")


@shapes
@pytest.mark.parametrize("step", [1, 500])
def test_formula(rows: int, d: int, step: int) -> None:
    """Caught: corrections rounded in fp32 (5e-5 at step 1), eps under the root or before the correction, coupled decay,
    decay after the move, a norm over the padded or over all rows, the second moment from the unscaled gradient."""
    state, gradient = started(rows, d), matrix(rows, d, 3, 0.05)
    actual, expected = moved(state, gradient, step, 1.7, **OPTIONS), formula(state, gradient, step, 1.7, **OPTIONS)
    for name, x in expected.items():
        assert error(actual[name], x) <= 1e-6, name


@pytest.mark.parametrize(
    "changed",
    [
        {"constraint": "free"},
        {"constraint": "ball"},
        {"weight_decay": 0.0},
        {"beta1": 0.8, "beta2": 0.95},
        {"beta1": 0.0, "beta2": 0.0},
        {"beta1": 0.999, "beta2": 0.9999},
        {"lr": 0.0},
        {"eps": 1e-12},
    ],
    ids=str,
)
def test_options(changed: dict[str, Any]) -> None:
    """Caught: an option that is compiled in or ignored, rows divided where nobody asked, the betas exchanged."""
    options = OPTIONS | changed
    state, gradient = started(6, 96), matrix(6, 96, 3, 0.05)
    for step in (1, 3, 70, 100_000):
        actual, expected = moved(state, gradient, step, **options), formula(state, gradient, step, 1.0, **options)
        for name, x in expected.items():
            assert error(actual[name], x) <= 1e-6, (name, step)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_a_copy_in_bf16(kernels: str) -> None:
    """Caught: the weight from before the step or before the division in the copy, elements left out."""
    state, gradient = started(19, 72), matrix(19, 72, 3, 0.05)
    state["copy"] = torch.full((19, 72), torch.nan, dtype=torch.bfloat16)
    with dispatch.chosen(kernels):
        after = moved(state, gradient, 4, **OPTIONS)
    # The interpreter cuts digits off where a GPU rounds.
    assert error(after["copy"], after["weight"]) <= 6e-3
    torch.testing.assert_close(after["copy"].float(), after["weight"], rtol=2**-7, atol=0)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize(
    ("dtype", "layout", "grad_scale"),
    [
        (torch.float32, "contiguous", None),
        (torch.float32, "transposed", 1.7),
        (torch.bfloat16, "sliced", 1.7),
        (torch.float16, "expanded", None),
    ],
)
def test_gradients_of_any_kind(kernels: str, dtype: torch.dtype, layout: str, grad_scale: float | None) -> None:
    """Caught: the weight's strides taken for the gradient's; moments in bf16; a gradient that the step changes."""
    gradient = matrix(11, 40, 3, 0.05).to(dtype)
    if layout == "transposed":
        gradient = gradient.T.contiguous().T
    if layout == "sliced":
        gradient = torch.cat([gradient, gradient.flip(0)], 1)[:, :40]
    if layout == "expanded":
        gradient = gradient[:, :1].expand(11, 40)
    before, state = gradient.clone(), started(11, 40)
    with dispatch.chosen(kernels):
        actual = moved(state, gradient, 3, grad_scale, **OPTIONS)
    assert torch.equal(gradient, before)
    for name, x in formula(state, gradient, 3, grad_scale, **OPTIONS).items():
        assert error(actual[name], x) <= 1e-6, name


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("step", [0, 5])
def test_a_step_that_is_skipped(kernels: str, step: int) -> None:
    """Bit for bit, the first of all as well. Caught: moments decayed, rows divided once more, 0 divided by 0."""
    state = started(17, 64) | {"copy": matrix(17, 64, 5).bfloat16()}
    gradient = matrix(17, 64, 3)
    gradient[3, 4], gradient[5] = torch.nan, torch.inf
    with dispatch.chosen(kernels):
        after = moved(state, gradient, step, 2.0, found_inf=torch.ones(()), **OPTIONS)
        for name, x in state.items():
            assert torch.equal(after[name], x), name
        moved_on = moved(state, matrix(17, 64, 3), 5, 2.0, found_inf=torch.zeros(()), **OPTIONS)
    assert error(moved_on["weight"], formula(state, matrix(17, 64, 3), 5, 2.0, **OPTIONS)["weight"]) <= 1e-6


def test_extreme_rows() -> None:
    """Caught: 0 / 0 for a row of zeros, a length below 1e-12 divided by itself, NaN hidden by a maximum."""
    zeros = torch.zeros(4, 64)
    weight = torch.stack([torch.zeros(64), torch.full((64,), 1e-14), torch.full((64,), 1e15), torch.ones(64)])
    gradient = zeros.clone()
    gradient[3, 7] = torch.nan
    state = {"weight": weight, "exp_avg": zeros, "exp_avg_sq": zeros}
    after = moved(state, gradient, 1, **OPTIONS | {"weight_decay": 0.0})["weight"]
    assert torch.equal(after[0], zeros[0])
    torch.testing.assert_close(after[1], torch.full((64,), 1e-2))
    torch.testing.assert_close(after[2], torch.full((64,), 1 / 8))
    assert after[3].isnan().all()
    with dispatch.chosen("torch"):
        expected = moved(state, gradient, 1, **OPTIONS | {"weight_decay": 0.0})["weight"]
    torch.testing.assert_close(after, expected, equal_nan=True)


def test_no_rows() -> None:
    """As on a rank without rows of a matrix that has fewer rows than there are ranks."""
    empty = torch.empty(0, 64)
    moved({"weight": empty, "exp_avg": empty, "exp_avg_sq": empty}, empty, 1, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gradient", torch.zeros(4, 7)),
        ("gradient", torch.zeros(5)),
        ("exp_avg", torch.zeros(1, 8)),
        ("weight", torch.zeros(8, 4).T),
        ("exp_avg_sq", torch.zeros(4, 16)[:, :8]),
        ("copy", torch.zeros(8, 4, dtype=torch.bfloat16).T),
    ],
)
def test_refused(name: str, tensor: Tensor) -> None:
    """Caught: memory read or written beside the matrix."""
    tensors = started(4, 8) | {"gradient": torch.zeros(4, 8), "copy": torch.zeros(4, 8).bfloat16(), name: tensor}
    with pytest.raises(ValueError, match=f"adam_rows_: {name} "):
        adam_rows_(step=torch.ones(()), grad_scale=None, found_inf=None, **tensors | OPTIONS)


@pytest.mark.parametrize(
    "weight", [torch.ones(2, 8, dtype=torch.float64), torch.ones(2, WIDEST + 1)], ids=["fp64", "wide"]
)
def test_what_the_kernel_does_not_know_runs_in_torch(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: fp64 weights moved by a kernel of fp32, or in fp32; rows that do not fit into its registers."""
    monkeypatch.setattr(gpu, "adam_rows_", lambda *_: pytest.fail("on Triton"))
    weight = weight.to(DEVICE)
    state = {"weight": weight, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    gradient = torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).view_as(weight)
    expected = formula(state, gradient, 1, 1.0, **OPTIONS)["weight"]
    assert error(moved(state, gradient, 1, **OPTIONS)["weight"], expected) <= (
        1e-14 if weight.dtype == torch.float64 else 1e-6
    )


def arguments(state: State, gradient: Tensor) -> dict[str, Any]:
    """Arguments of the raw operation."""
    tensors = {"copy": None, "grad_scale": torch.tensor(1.5), "found_inf": torch.zeros(())}
    numbers = {name: x for name, x in OPTIONS.items() if name != "constraint"} | {"floor": 1e-12}
    return tensors | state | {"gradient": gradient, "step": torch.tensor(2.0)} | numbers


def test_opcheck() -> None:
    """Caught: an argument that is changed and not declared so, which torch.compile would reorder."""
    given = arguments(started(3, 24), matrix(3, 24, 3))
    torch.library.opcheck(gpu.adam_rows_, (), given)
    torch.library.opcheck(gpu.adam_rows_, (), given | {"copy": torch.zeros(3, 24).bfloat16()})


@pytest.mark.skipif(not dispatch.interpreted(), reason="counts in the interpreter")
@pytest.mark.parametrize(("copy", "dtype", "expected"), [(False, torch.float32, 28), (True, torch.bfloat16, 28)])
def test_each_byte_once(copy: bool, dtype: torch.dtype, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the addresses of the interpreter's loads and stores. w, g, m, v are read once and w, m, v and the copy
    written once; the rest is a few numbers per program. Caught: a row read again after its length is known."""
    state, gradient = started(19, 96), matrix(19, 96, 3).to(dtype)
    if copy:
        state["copy"] = torch.zeros(19, 96, dtype=torch.bfloat16)
    places = state | {"gradient": gradient}
    touched: Counter[tuple[str, str]] = Counter()
    addresses: dict[tuple[str, str], list[np.ndarray]] = {}

    def note(kind: str, at: np.ndarray, mask: np.ndarray) -> None:
        at = np.broadcast_to(at, mask.shape)[mask]
        for name, x in places.items():
            inside = at[(at >= x.data_ptr()) & (at < x.data_ptr() + x.nbytes)]
            touched[kind, name] += inside.size * x.itemsize
            addresses.setdefault((kind, name), []).append(inside)
            at = np.setdiff1d(at, inside)
        touched[kind, "numbers"] += 4 * at.size

    real = interpreter._interpreter

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def load(self, at, mask, *rest):
            note("load", at, mask)
            return real.load(at, mask, *rest)

        def store(self, at, value, mask):
            note("store", at, mask)
            return real.store(at, value, mask)

    monkeypatch.setattr(interpreter, "_interpreter", Counting())
    adam_rows_(
        gradient=gradient,
        step=torch.tensor(2.0),
        grad_scale=torch.ones(()),
        found_inf=torch.zeros(()),
        **state | OPTIONS,
    )
    for (kind, name), parts in addresses.items():
        at = np.concatenate(parts)
        reads = kind == "load" and name != "copy"
        writes = kind == "store" and name != "gradient"
        assert at.size == np.unique(at).size == (19 * 96 if reads or writes else 0), (kind, name)
    numbers = touched.pop(("load", "numbers"))
    assert touched.pop(("store", "numbers")) == 0
    assert sum(touched.values()) == expected * 19 * 96
    programs = -(-19 // gpu.geometry(96)[0])
    assert numbers <= 3 * 4 * programs
