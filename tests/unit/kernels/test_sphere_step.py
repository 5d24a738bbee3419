"""The step on the sphere: Triton's kernels and the hand-written gradients against autograd of the formula in fp64."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ngpt_train.kernels import sphere_step as module
from ngpt_train.kernels.dispatch import chosen
from ngpt_train.kernels.sphere_step import HiddenState

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


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


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float(((found.double() - wanted).norm() / wanted.norm()).detach())


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 1024), (2, 3, 1280), (5, 77), (1, 1, 1), (9, 333)])
def test_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Caught: a missing term or factor of any gradient, a mask, rows or programs left out, the second gradient lost."""
    h, x, alpha, *g = inputs(shape, dtype)
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    with chosen("triton"):
        out = sphere_step(*arguments)
        found = gradients(out, arguments, g)
    for one, other in zip(found, expected(h, x, alpha, *g), strict=True):
        if shape[-1] > 1 or other.norm() > 1e-9:  # on a sphere of one dimension nothing moves
            assert error(one, other) < TOLERANCE[dtype]
    assert [t.dtype for t in found] == [dtype] * 4 + [torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_by_hand(dtype: torch.dtype) -> None:
    """The path without Triton. Caught: the same, and rounding to the dtype of the input on the way."""
    h, x, alpha, *g = inputs((4, 5, 96), dtype)
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    found = gradients(sphere_step(*arguments), arguments, g)
    for one, other in zip(found, expected(h, x, alpha, *g), strict=True):
        assert error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("first", [0, 1])
def test_strided_input(kernels: str, first: int) -> None:
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
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    with chosen(kernels):
        found = gradients(sphere_step(*arguments), arguments, g)
    for one, other in zip(found, expected(h, x, alpha, *g), strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_one_alpha_for_all_dimensions(kernels: str) -> None:
    """Expanded. Caught: an alpha that is read as if it were contiguous."""
    h, x, _, *g = inputs((3, 40), torch.float32)
    arguments = [t.requires_grad_() for t in (h, x, torch.full((1,), -0.3).expand(40))]
    with chosen(kernels):
        found = gradients(sphere_step(*arguments), arguments, g)
    for one, other in zip(found, expected(*arguments, *g), strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_each_gradient_has_its_own_dtype(kernels: str) -> None:
    """Caught: alpha rounded to h's dtype, here by 0.4 %, and a gradient of x that is."""
    h, x, _, *g = inputs((4, 1024), torch.bfloat16)
    alpha = torch.full((1024,), 0.25 * (1 + 0.99 * 2**-8))
    arguments = [t.requires_grad_() for t in (h, x.float(), alpha)]
    with chosen(kernels):
        out = sphere_step(*arguments)
        found = torch.autograd.grad(out, arguments, g)
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32, torch.float32]
    # Of the way from the output for alpha to the one for the rounded alpha: noise of 1 / sqrt(4096), or all of it.
    right, rounded = expected(h, x, alpha, *g)[0], expected(h, x, alpha.detach().bfloat16(), *g)[0]
    assert abs(((out[0].double() - right) * (rounded - right)).sum() / (rounded - right).square().sum()) < 0.2
    assert (found[1] != found[1].bfloat16()).float().mean() > 0.9
    # Without Triton h' is kept in bf16, and the part of the gradient along it with it.
    assert error(found[1], expected(*arguments, *g)[3]) < {"triton": 1e-3, "torch": 3e-3}[kernels]


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_not_a_number_stays_in_its_row(kernels: str) -> None:
    """And is all of it. Caught: a maximum that drops it, so that huge numbers train on."""
    h, x, alpha, *_ = inputs((3, 64), torch.float32)
    x[1, 5], h[2, 7] = torch.nan, torch.nan
    with chosen(kernels):
        out = sphere_step(h, x, alpha)[0]
    assert out.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("used", [0, 1])
def test_one_output_may_go_nowhere(kernels: str, used: int) -> None:
    """Caught: a gradient that is not there and is read, or taken for the other one twice."""
    h, x, alpha, *g = inputs((3, 64), torch.float32)
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    with chosen(kernels):
        found = torch.autograd.grad(sphere_step(*arguments)[used], arguments, g[used])
    for one, other in zip(found, expected(h, x, alpha, g[used])[2:], strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_rows_of_zeros_and_extreme_lengths(kernels: str) -> None:
    """A row without a direction gives no NaN. Caught: a length without a lower bound."""
    h, x, alpha, *g = inputs((5, 64), torch.float32)
    x = x.clone()
    x[0], x[1], x[2] = 0, 1e-17 * x[1], 1e17 * x[2]
    h[3] = 0
    x[4] = h[4] = 0
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    with chosen(kernels):
        found = gradients(sphere_step(*arguments), arguments, g)
    for one, other in zip(found, expected(h, x, alpha, *g), strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_compiled_and_recomputed(kernels: str) -> None:
    """Without a break of the graph. Caught: an operator that the compiler cannot see through or past."""
    h, x, alpha, *g = inputs((3, 4, 64), torch.float32)
    arguments = [t.requires_grad_() for t in (h, x, alpha)]

    def step(h: Tensor, x: Tensor, alpha: Tensor) -> Tensor:
        h, read = sphere_step(h, x.sin(), alpha)
        return (h + read.cos()) * g[0]

    with chosen(kernels):
        eager = gradients((step(*arguments),), arguments, g[1:])
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for run in (compiled, lambda *a: checkpoint(step, *a, use_reentrant=False)):
            for one, other in zip(gradients((run(*arguments),), arguments, g[1:]), eager, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_compiled_gradients_arrive_apart(kernels: str, backend: str) -> None:
    """Caught: outputs that are one tensor, or one a view of the other, whose gradients autograd adds up outside of the
    compiled graph, which gets zeros for the second; a copy."""
    h, x, alpha, *g = inputs((3, 64), torch.float32)
    arguments = [t.requires_grad_() for t in (h, x, alpha)]
    torch.compiler.reset()
    with chosen(kernels):
        out, too = torch.compile(sphere_step, backend=backend, fullgraph=True)(*arguments)
    assert out is not too
    assert out.data_ptr() == too.data_ptr()
    assert out.grad_fn is too.grad_fn
    for one, other in zip(gradients((out, too), arguments, g), expected(h, x, alpha, *g), strict=True):
        assert error(one, other) < 1e-5


def test_operators_are_registered_as_torch_asks() -> None:
    from ngpt_train.kernels.gpu.sphere_step import sphere_step_backward, sphere_step_forward

    h, x, alpha, *g = inputs((3, 64), torch.float32)
    torch.library.opcheck(sphere_step_forward, (h, x, alpha))
    _, r_x, r_u = sphere_step_forward(h, x, alpha)
    for too in (None, g[1]):
        torch.library.opcheck(sphere_step_backward, (g[0], too, h, x, alpha, r_x, r_u))
