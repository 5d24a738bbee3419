"""Looks at an operation: its error, and the calls inside of it."""

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Counts matrix products, refuses what makes the host wait for the device, and remembers the largest tensor."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __init__(self, operation: CustomOpDef) -> None:
        super().__init__()
        self.operation = operation
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function._schema.name.removeprefix("aten::"), kwargs or {}
        if function is self.operation._opoverload:
            with self:  # a mode sees the operation as one call: look inside
                return self.operation._init_fn(*args, **kwargs)
        with self:  # inside of it, calls such as item and cpu arrive before they are taken apart
            if (out := function.decompose(*args, **kwargs)) is not NotImplemented:
                return out
        assert name not in self.WAITS, f"{name} waits for the device"
        if name.startswith("index"):
            indices = args[1] if isinstance(args[1], list) else []
            assert all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in indices), "index by a mask"
        self.products += name in ("mm", "addmm", "addmm_", "bmm")
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
