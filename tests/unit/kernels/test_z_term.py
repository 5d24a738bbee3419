"""The two parts of the loss of kernels/cross_entropy.py, told apart."""

from collections.abc import Iterator

import pytest
import torch

from ngpt_train.kernels import cross_entropy, dispatch
from ngpt_train.kernels.cross_entropy import linear_cross_entropy


@pytest.fixture(params=["torch", "triton"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, poison: None) -> Iterator[None]:
    monkeypatch.setattr(cross_entropy, "CPU_ROWS", 5)
    with dispatch.chosen(request.param):
        yield


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [1, 13])
def test_the_parts(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    """Catches a z-loss in the reported cross-entropy, left out of the loss or of one chunk, or of a target that does
    not count; and a part that has gradients."""
    torch.manual_seed(rows)
    h, matrix = torch.randn(rows, 64).to(dtype).requires_grad_(), (torch.randn(101, 64) / 8).requires_grad_()
    targets = torch.randint(101, (rows,))
    targets[3:5] = -100
    alone, same, nothing = linear_cross_entropy(h, matrix, targets)
    assert alone.requires_grad
    assert not same.requires_grad
    assert torch.equal(alone, same)
    assert nothing is None
    loss, told, z_term = linear_cross_entropy(h, matrix, targets, None, 0.5)
    assert z_term is not None
    assert torch.equal(told, alone)
    assert torch.equal(loss, told + z_term)
    assert not told.requires_grad
    assert not z_term.requires_grad
    formula = linear_cross_entropy.formula
    exact = h.detach().double(), matrix.detach().to(dtype).double(), targets
    expected = formula(*exact, None, 0.5)[0] - formula(*exact)[0]
    assert abs(z_term.double() - expected) <= tolerance * expected
    assert loss.requires_grad
    with torch.no_grad():
        assert not linear_cross_entropy(h, matrix, targets, None, 0.5)[0].requires_grad


def test_a_small_part_is_not_lost_beside_a_large_one() -> None:
    """Where it does its job, logsumexp is near 0. Catches a term that is had as the difference of two large sums."""
    torch.manual_seed(0)
    h, matrix, targets = torch.zeros(50, 4), torch.randn(3, 4), torch.zeros(50, dtype=torch.long)
    h[:, 0] = 1
    with torch.no_grad():
        matrix[:, 0] -= matrix[:, 0].logsumexp(0) - 0.03  # log(sum of exp(logits)) is 0.03
    z_term = linear_cross_entropy(h, matrix, targets, None, 1e-4)[2]
    assert z_term is not None
    assert z_term.item() == pytest.approx(50 * 1e-4 * 0.03**2, rel=1e-4)
