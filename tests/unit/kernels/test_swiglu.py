"""SwiGLU with scale vectors: the Triton kernels and the plain formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ngpt_train.kernels.dispatch import runs_on_triton
from ngpt_train.kernels.swiglu import backward_by_hand, scaled_linear, scaled_swiglu, swiglu
from tests.combinations import pairs_first
from tests.unit.kernels.looks import error

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def inputs(shape: tuple[int, ...], dtype: torch.dtype, scaled: bool = True) -> list[Tensor]:
    """uv of y's shape, and the vectors, of about the size they have in a trained model."""
    m = shape[-1]
    uv = torch.randn(*shape[:-1], 2 * m, device=DEVICE).to(dtype).requires_grad_()
    vectors = [torch.randn(m, device=DEVICE) * 0.3 + 1, torch.randn(m, device=DEVICE) * 0.5 + 1.5]
    return [uv, *(vector.requires_grad_() for vector in vectors)] if scaled else [uv]


def compare(
    arguments: list[Tensor],
    dy: Tensor,
    function: Callable[..., Tensor] = swiglu,
    formula: Callable[..., Tensor] = swiglu.formula,
    tolerance: float | None = None,
) -> None:
    """Output and all gradients against autograd of the formula in fp64. tolerance: of each; None: of its dtype."""
    exact = [x.detach().double().requires_grad_() for x in arguments]
    y, expected = function(*arguments), formula(*exact)
    assert (y.shape, y.dtype) == (expected.shape, arguments[0].dtype)
    assert error(y, expected) <= (tolerance or TOLERANCE[y.dtype])
    gradients = torch.autograd.grad(y, arguments, dy)
    for x, found, right in zip(arguments, gradients, torch.autograd.grad(expected, exact, dy.double()), strict=True):
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        assert error(found, right) <= (tolerance or TOLERANCE[found.dtype])


@pairs_first(
    shape=[(1, 1), (1, 37), (2, 3, 64), (7, 1024), (2, 2, 1280), (3, 2500)],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    scaled=[True, False],
)
@pytest.mark.usefixtures("kernels", "poison")
def test_matches_fp64(shape: tuple[int, ...], dtype: torch.dtype, scaled: bool) -> None:
    """Catches a wrong sign, factor, mask or offset, and columns, rows or partial sums that nobody writes."""
    torch.manual_seed(0)
    compare(inputs(shape, dtype, scaled), torch.randn(shape, device=DEVICE).to(dtype))


@pytest.mark.parametrize("scaled", [True, False])
def test_by_hand(scaled: bool) -> None:
    """The path without Triton. Catches a wrong factor that half precision's rounding would hide."""
    torch.manual_seed(3)
    arguments = [x.detach().double().requires_grad_() for x in inputs((2, 3, 20), torch.float32, scaled)]
    dy = torch.randn(2, 3, 20, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        found = backward_by_hand(dy, *arguments, *[None] * (3 - len(arguments)))
    expected = torch.autograd.grad(swiglu.formula(*arguments), arguments, dy)
    assert all(error(one, other) < 1e-13 for one, other in zip(found, expected, strict=False))
    assert scaled or found[1:] == (None, None)


@pytest.mark.usefixtures("kernels", "poison")
def test_strides() -> None:
    """Catches a row or column stride taken for granted: of uv, of dy, of vectors that are one number, expanded."""
    torch.manual_seed(1)
    wide = torch.randn(2, 3, 300, device=DEVICE)
    one = torch.full((1,), 1.25, device=DEVICE).expand(70).requires_grad_()
    number = torch.randn(1, device=DEVICE).expand(2, 3, 70)
    for uv in (wide[..., 7:147], wide.movedim(-1, 0)[:140].movedim(0, -1).contiguous().transpose(0, 1), wide[..., ::2]):
        uv = uv[..., :140].detach().requires_grad_()
        for dy in (number, wide[..., 150:220], wide[..., 150:290:2]):
            compare(
                [uv, one, torch.rand(70, device=DEVICE).requires_grad_()], dy.reshape(-1, 70).view(*uv.shape[:2], 70)
            )


@pytest.mark.usefixtures("kernels", "poison")
def test_extreme_values() -> None:
    """Catches an overflow of exp, and 0 * inf, far out on either side of SiLU; and a division by zero at 0."""
    v = torch.tensor([0.0, -0.0, 30.0, -30.0, 100.0, -100.0, 1e4, -1e4], device=DEVICE)
    uv = torch.cat([torch.ones_like(v), v])[None].requires_grad_()
    ones = [torch.ones_like(v).requires_grad_() for _ in range(2)]
    compare([uv, *ones], torch.ones_like(v)[None])
    zeros = torch.zeros(4, 16, device=DEVICE, requires_grad=True)
    y = swiglu(zeros)
    (gradient,) = torch.autograd.grad(y.sum(), zeros)
    assert y.eq(0).all()
    assert gradient.eq(0).all()


@pytest.mark.usefixtures("kernels")
def test_no_rows() -> None:
    """Catches a launch, or a partial sum, that supposes at least one row."""
    uv, s_u, s_v = inputs((0, 8), torch.float32)
    gradients = torch.autograd.grad(swiglu(uv, s_u, s_v).sum(), (uv, s_u, s_v))
    assert [g.shape for g in gradients] == [(0, 16), (8,), (8,)]
    assert gradients[1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_formula(dtype: torch.dtype) -> None:
    """Catches u and v swapped, or the vectors, in the kernel's reference; and arithmetic in bf16."""
    uv, s_u, s_v = (x.detach().to(dtype) for x in inputs((3, 5), torch.float64))
    u, v = (uv.double()[:, part] for part in (slice(5), slice(5, 10)))
    x = s_v.double() * v
    expected = s_u.double() * u * x / (1 + (-x).exp())
    y = swiglu.formula(uv, s_u, s_v)
    assert y.dtype == dtype
    assert torch.equal(y, expected.to(dtype)) or error(y, expected) <= 1e-15
    assert error(swiglu.formula(uv), u * v / (1 + (-v).exp())) <= (1e-15 if dtype == torch.float64 else 4e-3)


def test_torch_path() -> None:
    """Catches a CPU model sent to Triton, and gradients by hand that are not autograd's to the bit."""
    torch.manual_seed(0)
    uv, dy = torch.randn(3, 5, 64, requires_grad=True), torch.randn(3, 5, 32)
    assert not runs_on_triton("swiglu", uv)
    (found,), (right,) = (torch.autograd.grad(f(uv), uv, dy) for f in (swiglu, swiglu.formula))
    assert torch.equal(found, right)


def test_refusals() -> None:
    """Catches shapes that would broadcast, or read beyond a vector."""
    uv, s = torch.ones(2, 8), torch.ones(4)
    for arguments in ((torch.ones(2, 7),), (uv, s), (uv, None, s), (uv, s[:1], s), (uv, s, s[:3])):
        with pytest.raises(ValueError, match="swiglu"):
            swiglu(*arguments)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of either sign, not small."""
    return (torch.rand(shape, dtype=torch.float64) - 0.4).to(dtype).requires_grad_()


@pytest.mark.parametrize("leading", [(1,), (2, 3)], ids=str)
def test_scaled_linear(leading: tuple[int, ...]) -> None:
    """Caught: a scale left out of the product or of a gradient, its gradient taken after scaling, tokens left out."""
    torch.manual_seed(sum(leading))
    dy = draw(*leading, 11).detach()
    compare([draw(*leading, 7), draw(11, 7), draw(11)], dy, scaled_linear, lambda x, matrix, s: (x @ matrix.T) * s)


TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("on", ["a CPU", "a GPU"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_scaled_swiglu(dtype: torch.dtype, on: str) -> None:
    """Caught: s_u and s_v exchanged, halves exchanged, a gradient in the wrong dtype. On a GPU u and v are scaled, on a
    CPU the matrix."""
    torch.manual_seed(0)
    vectors = [draw(24, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)]
    arguments, dy = [draw(3, 4, 16, dtype=dtype), draw(48, 16, dtype=dtype), *vectors], draw(3, 4, 24, dtype=dtype)
    function = scaled_swiglu if on == "a CPU" else lambda x, w_uv, *s: swiglu(x @ w_uv.T, *s)
    reference = lambda x, w_uv, *s: swiglu.formula(x @ w_uv.T, *s)  # noqa: E731
    compare(arguments, dy.detach(), function, reference, TOLERANCES[dtype])
