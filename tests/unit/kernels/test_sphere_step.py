"""The step on the sphere: Triton's kernels and the hand-written gradients against autograd of the formula in fp64."""

import pytest
import torch
from torch import Tensor

from ngpt_train.kernels import sphere_step as module
from ngpt_train.kernels.sphere_step import HiddenState
from tests.unit.kernels.looks import error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def sphere_step(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    return module.sphere_step(HiddenState(h, h), x, alpha)


def formula(h: Tensor, x: Tensor, alpha: Tensor) -> Tensor:
    return module.sphere_step.formula(HiddenState(h, h), x, alpha).to_move


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """h on the sphere, x of any length, alpha of either sign, and two gradients of the result."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    d = shape[-1]
    h = torch.nn.functional.normalize(normal(*shape), dim=-1)
    x = normal(*shape) * torch.exp(normal(*shape[:-1], 1))
    return [t.to(dtype) for t in (h, x)] + [
        (0.3 * normal(d) + 0.2).to(torch.promote_types(dtype, torch.float32)),
        *(t.to(dtype) for t in (normal(*shape), normal(*shape))),
    ]


def gradients(out: tuple[Tensor, ...], arguments: list[Tensor], g: list[Tensor]) -> list[Tensor]:
    return [*out, *torch.autograd.grad(out, arguments, g)]


def expected(h: Tensor, x: Tensor, alpha: Tensor, *g: Tensor) -> list[Tensor]:
    wide = [t.double().requires_grad_() for t in (h, x, alpha)]
    out = formula(*wide)
    return [out, out, *torch.autograd.grad(out, wide, sum(one.double() for one in g))]


def check(h: Tensor, x: Tensor, alpha: Tensor, g: list[Tensor]) -> None:
    """Outputs and gradients against autograd of the formula in fp64."""
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    found = gradients(sphere_step(*arguments), arguments, g)
    for one, other in zip(found, expected(h, x, alpha, *g), strict=True):
        if h.shape[-1] > 1 or other.norm() > 1e-9:  # on a sphere of one dimension nothing moves
            assert error(one, other) < TOLERANCE[h.dtype]
    assert [t.dtype for t in found] == [h.dtype] * 4 + [alpha.dtype]


@pytest.mark.usefixtures("kernels", "poison")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in [(1, 64), (7, 1024), (2, 3, 1280), (5, 77), (1, 1, 1)]),
        *(((9, 333), dtype) for dtype in (torch.bfloat16, torch.float16)),
        ((2, 3, 1280), torch.bfloat16),
    ],
)
def test_matches_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Caught: a missing term or factor of any gradient, a mask, rows or programs left out, the second gradient lost,
    without Triton rounding to the dtype of the input on the way."""
    h, x, alpha, *g = inputs(shape, dtype)
    check(h, x, alpha, g)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.usefixtures("kernels")
def test_strided_input(first: int) -> None:
    """Slices, transposes and broadcast gradients. Caught: a stride that is taken for the width, or for another's."""
    h, x, alpha, *g = inputs((6, 4, 80), torch.float32)
    h = torch.cat([h, h], -1)[..., :80]
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    slices = [torch.cat([one, one, one], -1)[..., :80] for one in g]  # whose rows are not copied together
    g = (
        [slices[0], g[1].permute(2, 0, 1).contiguous().permute(1, 2, 0)]
        if first
        else [g[0].expand(6, 4, 80), slices[1]]
    )
    check(h, x, alpha, g)


@pytest.mark.usefixtures("kernels")
def test_one_alpha_for_all_dimensions() -> None:
    """Expanded. Caught: an alpha that is read as if it were contiguous."""
    h, x, _, *g = inputs((3, 40), torch.float32)
    check(h, x, torch.full((1,), -0.3).expand(40), g)


def test_each_gradient_has_its_own_dtype(kernels: str) -> None:
    """Caught: alpha rounded to h's dtype, here by 0.4 %, and a gradient of x that is."""
    h, x, _, *g = inputs((4, 1024), torch.bfloat16)
    alpha = torch.full((1024,), 0.25 * (1 + 0.99 * 2**-8))
    arguments = [t.requires_grad_() for t in (h, x.float(), alpha)]
    out = sphere_step(*arguments)
    found = torch.autograd.grad(out, arguments, g)
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32, torch.float32]
    # Of the way from the output for alpha to the one for the rounded alpha: noise of 1 / sqrt(4096), or all of it.
    right, rounded = expected(h, x, alpha, *g)[0], expected(h, x, alpha.detach().bfloat16(), *g)[0]
    assert abs(((out[0].double() - right) * (rounded - right)).sum() / (rounded - right).square().sum()) < 0.2
    assert (found[1] != found[1].bfloat16()).float().mean() > 0.9
    # Without Triton h' is kept in bf16, and the part of the gradient along it with it.
    assert error(found[1], expected(*arguments, *g)[3]) < {"triton": 1e-3, "torch": 3e-3}[kernels]


@pytest.mark.usefixtures("kernels")
def test_not_a_number_stays_in_its_row() -> None:
    """And is all of it. Caught: a maximum that drops it, so that huge numbers train on."""
    h, x, alpha, *_ = inputs((3, 64), torch.float32)
    x[1, 5], h[2, 7] = torch.nan, torch.nan
    out = sphere_step(h, x, alpha)[0]
    assert out.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.usefixtures("kernels")
def test_one_output_may_go_nowhere(used: int) -> None:
    """Caught: a gradient that is not there and is read, or taken for the other one twice."""
    h, x, alpha, *g = inputs((3, 64), torch.float32)
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    found = torch.autograd.grad(sphere_step(*arguments)[used], arguments, g[used])
    for one, other in zip(found, expected(h, x, alpha, g[used])[2:], strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.usefixtures("kernels")
def test_rows_of_zeros_and_extreme_lengths() -> None:
    """A row without a direction gives no NaN. Caught: a length without a lower bound."""
    h, x, alpha, *g = inputs((5, 64), torch.float32)
    x = x.clone()
    x[0], x[1], x[2] = 0, 1e-17 * x[1], 1e17 * x[2]
    h[3] = 0
    x[4] = h[4] = 0
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    found = gradients(sphere_step(*arguments), arguments, g)
    for one, other in zip(found, expected(h, x, alpha, *g), strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("kernels")
def test_compiled_gradients_arrive_apart(backend: str) -> None:
    """Caught: outputs that are one tensor, or one a view of the other, whose gradients autograd adds up outside of the
    compiled graph, which gets zeros for the second; a copy."""
    h, x, alpha, *g = inputs((3, 64), torch.float32)
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    torch.compiler.reset()
    out, too = torch.compile(sphere_step, backend=backend, fullgraph=True)(*arguments)
    assert out is not too
    assert out.data_ptr() == too.data_ptr()
    assert out.grad_fn is too.grad_fn
    for one, other in zip(gradients((out, too), arguments, g), expected(h, x, alpha, *g), strict=True):
        assert error(one, other) < 1e-5
