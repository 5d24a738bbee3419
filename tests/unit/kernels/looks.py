"""Looks at an operation: its error, and the calls inside of it."""

from torch import Tensor
from torch.library import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Counts matrix products, and remembers the size of the largest tensor."""

    def __init__(self, operation: CustomOpDef) -> None:
        super().__init__()
        self.operation = operation
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is self.operation._opoverload:
            with self:  # a mode sees the operation as one call: look inside
                return self.operation._init_fn(*args, **kwargs)
        self.products += function._schema.name.removeprefix("aten::") in ("mm", "addmm", "addmm_", "bmm")
        out = function(*args, **kwargs)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; infinite for a NaN, and large for any difference from 0."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    difference = (found - expected).norm() / expected.norm().clamp_min(1e-300)
    return float(difference.nan_to_num(nan=float("inf")))
