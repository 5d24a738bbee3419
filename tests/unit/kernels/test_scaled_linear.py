"""Products with a matrix whose rows have scales, against autograd of s (W x) in fp64."""

import pytest
import torch
from torch import Tensor

from ngpt_train.kernels.scaled_linear import scaled_linear, scaled_swiglu
from ngpt_train.kernels.swiglu import swiglu


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of either sign, not small."""
    return (torch.rand(shape, dtype=torch.float64) - 0.4).to(dtype).requires_grad_()


def results(out: Tensor, arguments: list[Tensor], g: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, arguments, g)]


def check(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (2, 1, 4)], ids=str)
def test_scaled_linear(leading: tuple[int, ...]) -> None:
    """Caught: a scale left out of the product or of a gradient, its gradient taken after scaling, tokens left out."""
    torch.manual_seed(sum(leading))
    x, matrix, scale = arguments = [draw(*leading, 7), draw(11, 7), draw(11)]
    g = draw(*leading, 11).detach()
    wanted = results((x @ matrix.T) * scale, arguments, g)
    check(results(scaled_linear(*arguments), arguments, g), wanted, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scaled_swiglu(dtype: torch.dtype) -> None:
    """Folded or not. Caught: s_u and s_v exchanged, halves exchanged, scales rounded into bf16 weights."""
    torch.manual_seed(0)
    master = torch.promote_types(dtype, torch.float32)
    x, s_u, s_v = draw(3, 4, 16, dtype=dtype), draw(24, dtype=master), draw(24, dtype=master)
    w_uv = draw(48, 16, dtype=dtype)
    arguments, g = [x, w_uv, s_u, s_v], draw(3, 4, 24, dtype=dtype).detach()
    wide = [argument.detach().double().requires_grad_() for argument in arguments]
    wanted = results(swiglu.formula(wide[0] @ wide[1].T, wide[2], wide[3]), wide, g.double())
    found = results(scaled_swiglu(*arguments), arguments, g)
    assert [one.dtype for one in found] == [dtype, dtype, dtype, master, master]
    check(found, wanted, {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype])
