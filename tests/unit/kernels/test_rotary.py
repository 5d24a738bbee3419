"""Rotary positions with QK-norm and scale: the Triton kernels and the way by hand."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ngpt_train.kernels.rotary import QKV, Options, Rope
from ngpt_train.kernels.rotary import rotary as operation
from ngpt_train.models.layers.rope import rope_table
from tests.combinations import pairs_first
from tests.unit.kernels.looks import error

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, options: Options, scale: Tensor | None, *, formula: bool = False
) -> tuple[Tensor, ...]:
    of_heads = QKV.of(qkv, options.n_heads, options.n_kv_heads)
    function = operation.formula if formula else operation
    return function(of_heads, Rope(cos, sin, options.interleaved), options.normalized, scale)


class Case(NamedTuple):
    B: int
    T: int
    n_heads: int
    n_kv_heads: int
    D: int
    documents: bool = False  # positions that begin anew


CASES = [
    Case(1, 1, 1, 1, 2),
    Case(2, 5, 3, 1, 6, documents=True),
    Case(2, 3, 16, 16, 64),
    Case(1, 4, 20, 4, 64, documents=True),
    Case(1, 2, 40, 8, 32),
    Case(2, 2, 6, 2, 80, documents=True),
    Case(1, 3, 5, 5, 96),
    Case(1, 2, 5, 3, 256),
]


def angles(case: Case, interleaved: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Angles of positions that begin late, so that no angle is 0."""
    rope = rope_table(case.T + 7, case.D, 100.0, interleaved, DEVICE, dtype)
    if case.documents:
        positions = torch.randint(case.T + 7, (case.B, case.T), device=DEVICE)
        return rope.cos[positions], rope.sin[positions]
    return rope.cos[7:], rope.sin[7:]


def packed(case: Case, dtype: torch.dtype) -> Tensor:
    """Heads of very different lengths, because Norm hides a length that is wrong by a factor."""
    heads = case.n_heads + 2 * case.n_kv_heads
    lengths = torch.rand(case.B, case.T, heads, 1, device=DEVICE) * 4 + 0.1
    return (torch.randn(case.B, case.T, heads, case.D, device=DEVICE) * lengths).flatten(2).to(dtype)


def scale_of(case: Case) -> Tensor:
    return torch.rand(case.n_heads * case.D, device=DEVICE) * 2


def gradients_of(y: tuple[Tensor, ...], case: Case) -> list[Tensor]:
    """dq', dk', dv, as attention leaves them: (B, H, T, D) in memory."""
    return [torch.randn_like(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in y]


def compare(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    case: Case,
    interleaved: bool,
    normalized: bool,
    scale: Tensor | None,
    dy: list[Tensor] | None = None,
) -> None:
    """Outputs and gradients against autograd of the formula in fp64."""
    arguments = [x.detach().requires_grad_() for x in (qkv, scale) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in arguments]
    options = Options(case.n_heads, case.n_kv_heads, interleaved, normalized)
    y = rotary(arguments[0], cos, sin, options, *(arguments[1:] or [None]))
    expected = rotary(exact[0], cos.double(), sin.double(), options, *(exact[1:] or [None]), formula=True)
    for x, right, heads in zip(y, expected, (case.n_heads, case.n_kv_heads, case.n_kv_heads), strict=True):
        assert (x.shape, x.dtype) == ((case.B, case.T, heads, case.D), qkv.dtype)
        assert error(x, right) <= TOLERANCE[qkv.dtype]
    assert y[0].is_contiguous()
    assert y[1].is_contiguous()
    assert y[2].untyped_storage().data_ptr() == arguments[0].untyped_storage().data_ptr(), "v is a copy"
    dy = dy or gradients_of(y, case)
    found = torch.autograd.grad(y, arguments, dy)
    right = torch.autograd.grad(expected, exact, [x.double() for x in dy])
    D = case.D
    bounds = [0, case.n_heads * D, (case.n_heads + case.n_kv_heads) * D, qkv.shape[-1]]
    assert (found[0].shape, found[0].dtype) == (qkv.shape, qkv.dtype)
    for start, end in pairwise(bounds):  # each by itself: v's gradient outweighs the others
        assert error(found[0][..., start:end], right[0][..., start:end]) <= TOLERANCE[qkv.dtype]
    if scale is not None:
        assert (found[1].shape, found[1].dtype) == (scale.shape, scale.dtype)
        assert error(found[1], right[1]) <= TOLERANCE[scale.dtype]


@pytest.mark.sampled(5)
@pairs_first(case=CASES, normalized=[False, True], interleaved=[False, True], dtype=[torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("kernels", "poison")
def test_matches_fp64(case: Case, interleaved: bool, normalized: bool, dtype: torch.dtype) -> None:
    """Catches a wrong sign, factor, mask, offset or order of norm and scale; angles of another row or token; heads,
    tokens and partial sums that nobody writes."""
    torch.manual_seed(0)
    cos, sin = angles(case, interleaved)
    compare(packed(case, dtype), cos, sin, case, interleaved, normalized, scale_of(case) if normalized else None)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.usefixtures("kernels", "poison")
def test_each_option_by_itself(interleaved: bool) -> None:
    """Catches a scale that is left out without a norm, or a norm without a scale (ablations of the paper)."""
    torch.manual_seed(1)
    case = Case(2, 3, 4, 2, 10)
    cos, sin = angles(case, interleaved)
    compare(packed(case, torch.float32), cos, sin, case, interleaved, True, None)
    compare(packed(case, torch.float32), cos, sin, case, interleaved, False, scale_of(case))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.usefixtures("kernels", "poison")
def test_strides(interleaved: bool) -> None:
    """Catches a stride taken for granted: of qkv, of the angles, of a scale that is one number, of each gradient."""
    torch.manual_seed(2)
    case = Case(2, 3, 4, 2, 12)
    cos, sin = (torch.cat([x, x], -1)[..., :6] for x in angles(case, interleaved))
    columns, number = 8 * case.D, torch.full((1,), 1.3, device=DEVICE).expand(4 * case.D)
    wide = torch.randn(3, 4, 2 * columns + 1, device=DEVICE)
    scattered = [torch.randn(5, 12, 4, 3, device=DEVICE).permute(2, 3, 0, 1)[:2, :, :h] for h in (4, 2, 2)]
    plain = [torch.randn(2, 3, h, 12, device=DEVICE) for h in (4, 2, 2)]
    constant = [torch.randn(1, device=DEVICE).expand(2, 3, h, 12) for h in (4, 2, 2)]
    for qkv, dy in (
        (wide[1:, :3, 1 : columns + 1], scattered),
        (wide[:, :2, ::2].transpose(0, 1)[..., 1:], constant),
        (wide[:2, :3, :columns], [plain[0], constant[1], scattered[2]]),
    ):
        compare(qkv, cos, sin, case, interleaved, True, number, dy)


@pytest.mark.usefixtures("kernels", "poison")
def test_vanishing_heads() -> None:
    """Catches a division by zero, and the gradient of a norm below the 1e-12 where Norm divides by a constant."""
    torch.manual_seed(3)
    case = Case(1, 4, 2, 2, 8)
    cos, sin = angles(case, False)
    qkv = packed(case, torch.float32)
    for factor in (0.0, 1e-13, 1e-11, 1e4):
        compare(qkv * factor, cos, sin, case, False, True, scale_of(case))
    qkv[:, 1:3] = 0
    y = rotary(qkv.requires_grad_(), cos, sin, Options(2, 2, False, True), scale_of(case))
    assert all(x[:, 1:3].eq(0).all() and x.isfinite().all() for x in y)
    assert torch.autograd.grad(y, qkv, gradients_of(y, case))[0].isfinite().all()


@pytest.mark.usefixtures("kernels")
def test_one_gradient() -> None:
    """Catches outputs that must all be used: here only k' is."""
    torch.manual_seed(4)
    case = Case(1, 3, 2, 2, 8)
    cos, sin = angles(case, False)
    qkv, scale = packed(case, torch.float32).requires_grad_(), scale_of(case).requires_grad_()
    k = rotary(qkv, cos, sin, Options(2, 2, False, True), scale)[1]
    d_qkv, d_scale = torch.autograd.grad(k, (qkv, scale), torch.randn_like(k))
    assert d_qkv[..., 16:32].ne(0).any()
    assert d_qkv[..., :16].eq(0).all()
    assert d_qkv[..., 32:].eq(0).all()
    assert d_scale.eq(0).all()


def test_formula() -> None:
    """Catches pairs, signs or heads swapped in the kernels' reference: here as complex numbers."""
    torch.manual_seed(6)
    case = Case(2, 3, 2, 1, 6)
    qkv, scale, position = packed(case, torch.float64), scale_of(case).double(), 2
    for interleaved in (False, True):
        cos, sin = angles(case, interleaved, torch.float64)
        q, k, v = rotary(qkv, cos, sin, Options(2, 1, interleaved, True), scale, formula=True)
        turn = torch.complex(cos, sin)[position, 0]  # (D/2,)
        for head, found in enumerate((q[1, position, 0], q[1, position, 1], k[1, position, 0])):
            x = qkv[1, position, 6 * head : 6 * head + 6]
            first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(3), slice(3, 6))
            z = torch.complex(x[first], x[second]) * turn
            expected = torch.empty_like(x)
            expected[first], expected[second] = z.real / x.norm(), z.imag / x.norm()
            expected *= scale[6 * head : 6 * head + 6] if head < 2 else 1
            assert error(found, expected) <= 1e-12
        assert torch.equal(v.flatten(2), qkv[..., 18:])


def test_refusals() -> None:
    """Catches shapes that would broadcast, or read beyond a tensor."""
    qkv, cos, s = torch.ones(2, 3, 24), torch.ones(3, 1, 4), torch.ones(8)
    for x, c, scale in ((qkv[..., 3:], cos, s), (qkv, cos[1:], s), (qkv, cos[None], s), (qkv, cos, s[:1])):
        with pytest.raises(ValueError, match="rotary"):
            rotary(x, c, c, Options(1, 1, False, True), scale)
    with pytest.raises(ValueError, match="rotary"):
        rotary(qkv, cos, cos[:1], Options(1, 1, False, True), s)
