"""Looks at an operation: its error, and the calls inside of it."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Counts matrix products, and remembers the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function._schema.name.removeprefix("aten::") in ("mm", "addmm", "addmm_", "bmm")
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; infinite for a NaN, and large for any difference from 0."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    difference = (found - expected).norm() / expected.norm().clamp_min(1e-300)
    return float(difference.nan_to_num(nan=float("inf")))
