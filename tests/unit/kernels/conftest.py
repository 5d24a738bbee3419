"""Set-up of the tests of kernels."""

from collections.abc import Iterator

import pytest
import torch

from ngpt_train.kernels import dispatch


@pytest.fixture
def poison() -> Iterator[None]:
    """New memory is NaN, so that whatever a kernel does not write is seen: what torch.empty and its like return."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.ones(()).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both implementations of an operation, Triton's in its interpreter."""
    with dispatch.chosen(request.param):
        yield request.param
