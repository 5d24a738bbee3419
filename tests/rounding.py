"""Another processor's rounding, made up: `NGPT_TESTS_ROUNDING=1 pytest ...` for every test.

Processors, and libraries on one processor, sum in other orders and have other exponentials. Here each result of such an
operation moves up, moves down or stays, as a hash of its own bits says, so what is computed twice is still the same
twice. It moves by one unit in its last place; a sum, or a product of matrices, by one roundoff of the magnitudes that
it adds up, which is more where they cancel. What is rounded to 16 bits comes from a sum in fp32, and one in 16 moves.
A test that holds with its tolerance here states one that comes from the arithmetic.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

SEED = int(os.environ.get("NGPT_TESTS_ROUNDING", "0"))
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# Whose result depends on the order of a sum, or on an approximation.
SUMMED = ("mm", "bmm", "addmm", "baddbmm", "sum", "mean")
ROUNDED = (*SUMMED, "linalg_vector_norm", "logsumexp", "exp", "log", "rsqrt")
ROUNDED += ("sqrt", "sin", "cos", "acos", "sigmoid", "silu", "silu_backward", "gelu", "gelu_backward", "_softmax")
ROUNDED += ("_softmax_backward_data", "_log_softmax", "native_layer_norm", "native_layer_norm_backward")
ROUNDED += tuple(f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward"))


class Rounding(TorchDispatchMode):
    """Counts the results that it has moved."""

    moved = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in args if isinstance(x, Tensor)]
        if function.namespace == "ngpt_train" and all(map(is_plain, tensors)):  # one call to whoever looks no further
            with self:
                return OPDEFS[function._schema.name]._init_fn(*args, **kwargs)
        name = function._schema.name.removeprefix("aten::")
        if name not in ROUNDED:
            name = name.removesuffix("_")
        if name not in ROUNDED:
            return function(*args, **kwargs)
        summed = name in SUMMED and all(is_moved(x) for x in tensors)
        # Before the operation, which may write over what it reads.
        magnitudes = magnitudes_of(name, args, kwargs) if summed else None
        found = function(*args, **kwargs)
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor) and is_moved(x):
                self.move_(x, magnitudes)
        return found

    def move_(self, x: Tensor, magnitudes: Tensor | None) -> None:
        bits = x.detach().contiguous().view(BITS[x.dtype])
        mixed = (bits.long() ^ (bits >> 7)) * 2654435761 + SEED
        chosen = (mixed >> 11) % 3 - 1  # -1, 0 or 1
        if x.element_size() == 2:
            chosen *= (mixed >> 17) % 16 == 0
        # The bits of a number and of the next one differ by 1, in either sign. 0 stays, and what is not finite.
        moved = torch.where(x == 0, x, (bits + chosen.to(bits.dtype)).view(x.dtype))
        if magnitudes is not None and x.element_size() > 2:
            moved = x + chosen * (torch.finfo(x.dtype).eps / 2) * magnitudes.to(x.dtype)
        x.copy_(torch.where(x.isfinite() & moved.isfinite(), moved, x))
        self.moved += x.numel()


def is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def is_moved(x: Tensor) -> bool:
    return is_plain(x) and x.dtype in BITS and x.numel() > 0


def magnitudes_of(name: str, args: Any, kwargs: Any) -> Tensor:
    """The same operation on absolute values."""
    factors = {key: abs(x) if key in ("alpha", "beta") else x for key, x in kwargs.items() if key != "out"}
    return getattr(torch.ops.aten, name)(*(x.abs() if isinstance(x, Tensor) else x for x in args), **factors)
