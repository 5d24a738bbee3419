"""RMSNorm by hand."""

import pytest
import torch
import torch.nn.functional as F

from ngpt_train.kernels.norm import rms_norm


@pytest.mark.parametrize("with_gain", [True, False])
@pytest.mark.parametrize("shape", [(2, 64, 128), (3, 5, 4, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_has_torchs_bits(shape: tuple[int, ...], dtype: torch.dtype, with_gain: bool) -> None:
    """Caught: another order of sums, eps in another place, a gain left out of the gradient of x."""
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    gain = torch.randn(shape[-1], dtype=dtype, requires_grad=True) if with_gain else None
    inputs = [x] if gain is None else [x, gain]
    results = [rms_norm(x, gain, 1e-2), F.rms_norm(x, shape[-1:], gain, 1e-2)]
    assert torch.equal(*results)
    for found, right in zip(*(torch.autograd.grad(y, inputs, dy.detach()) for y in results), strict=True):
        assert torch.equal(found, right)
