"""Label smoothing of kernels/cross_entropy.py, against torch's own and against its gradient written out in fp64."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.kernels import cross_entropy, dispatch
from ngpt_train.kernels.cross_entropy import linear_cross_entropy
from ngpt_train.kernels.gpu import cross_entropy as gpu

V, E = 101, 0.1

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter, computing what masks discard


@pytest.fixture(params=["torch", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, poison: None) -> Iterator[None]:
    """Several chunks and blocks of columns, the last ones not full."""
    monkeypatch.setattr(cross_entropy, "CPU_ROWS", 5)
    monkeypatch.setattr(gpu, "BLOCK", 64)
    with dispatch.chosen(request.param):
        yield


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, matrix, targets, scale; some targets do not count."""
    torch.manual_seed(0)
    h = torch.randn(13, 64).to(dtype).requires_grad_()
    matrix, scale = (torch.randn(V, 64) / 8).requires_grad_(), (0.5 + 3 * torch.rand(V)).requires_grad_()
    targets = torch.randint(V, (13,))
    targets[3:6] = -100
    return h, matrix, targets, scale


def written_out(
    h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor, smoothing: float, z_loss: float
) -> tuple[Tensor, ...]:
    """Loss, dh, dmatrix and dscale in fp64, from the label's distribution q and p = softmax(z): dz = p - q, and the
    z-loss's part."""
    h, matrix, scale = (x.detach().double() for x in (h, matrix, scale))
    counts = (targets != -100).double()[:, None]
    q = torch.full((len(h), V), smoothing / V, dtype=torch.float64)
    q[torch.arange(len(h)), targets.clamp(min=0)] += 1 - smoothing
    z = (h @ matrix.T) * scale
    lse = z.exp().sum(1, keepdim=True).log()
    p = (z - lse).exp()
    loss = (counts * (z_loss * lse**2 - (q * (z - lse)).sum(1, keepdim=True))).sum()
    dz = counts * (p - q + 2 * z_loss * lse * p)
    return loss, (dz * scale) @ matrix, (dz * scale).T @ h, (dz * (h @ matrix.T)).sum(0)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("smoothing", "z_loss"), [(E, 0.0), (0.6, 0.02)])
def test_written_out_is_torchs(smoothing: float, z_loss: float) -> None:
    """The reference of the next test is torch's convention: the target has a part of the smoothed share too."""
    h, matrix, targets, scale = draw()
    z = (h.detach().double() @ matrix.detach().double().T) * scale.detach()
    expected = F.cross_entropy(z, targets, label_smoothing=smoothing, reduction="sum")
    expected = expected + z_loss * (z.logsumexp(1) ** 2)[targets != -100].sum()
    torch.testing.assert_close(
        written_out(h, matrix, targets, scale, smoothing, z_loss)[0], expected, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(("dtype", "tolerance", "z_loss"), [(torch.float32, 1e-5, 0.02), (torch.bfloat16, 1e-2, 0.0)])
def test_loss_and_gradients(implementation: None, dtype: torch.dtype, tolerance: float, z_loss: float) -> None:
    """With nGPT's s_z. Caught: a share of another size, one spread over V - 1 tokens (fairseq's) or over the padding of
    a row, a mean over the first block of columns, gradients where a target does not count, a plain loss that is not the
    one without smoothing."""
    h, matrix, targets, scale = draw(dtype)
    loss, plain, z_term = linear_cross_entropy(h, matrix, targets, scale, z_loss, E)
    expected, *gradients = written_out(h, matrix, targets, scale, E, z_loss)
    assert error(loss, expected) <= tolerance
    for found, gradient in zip(torch.autograd.grad(loss, (h, matrix, scale)), gradients, strict=True):
        assert error(found, gradient) <= tolerance
    assert not plain.requires_grad
    assert torch.equal(plain, linear_cross_entropy(h, matrix, targets, scale, z_loss)[1])
    assert (z_term is None) == (z_loss == 0)


def test_the_formula_in_fp64() -> None:
    """Caught: a mistake that the formula shares with its twin, or a formula that tests take for the reference and that
    does not smooth."""
    h, matrix, targets, scale = (x.detach().double() if x.is_floating_point() else x for x in draw())
    expected, *gradients = written_out(h, matrix, targets, scale, E, 0.02)
    for compute in (linear_cross_entropy, linear_cross_entropy.formula):
        leaves = [x.clone().requires_grad_() for x in (h, matrix, scale)]
        loss = compute(leaves[0], leaves[1], targets, leaves[2], 0.02, E)[0]
        assert error(loss, expected) <= 1e-13
        for found, gradient in zip(torch.autograd.grad(loss, leaves), gradients, strict=True):
            assert error(found, gradient) <= 1e-12
