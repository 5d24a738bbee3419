"""Another processor's rounding, made up: `NGPT_TESTS_ROUNDING=1 pytest ...` for every test.

Processors, and libraries on one processor, sum in other orders and have other exponentials. Here each result of such an
operation moves by one unit in its last place, or stays, as a hash of its own bits says, so what is computed twice is
still the same twice. A test that holds with its tolerance here states one that comes from the arithmetic.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SEED = int(os.environ.get("NGPT_TESTS_ROUNDING", "0"))
BITS = {torch.float64: torch.int64, torch.float32: torch.int32}
# Whose result depends on the order of a sum, or on an approximation.
ROUNDED = ("mm", "bmm", "addmm", "baddbmm", "sum", "mean", "linalg_vector_norm", "logsumexp", "exp", "log", "rsqrt")
ROUNDED += ("sqrt", "sin", "cos", "acos", "sigmoid", "silu", "silu_backward", "gelu", "gelu_backward", "_softmax")
ROUNDED += ("_softmax_backward_data", "_log_softmax", "native_layer_norm", "native_layer_norm_backward")
ROUNDED += tuple(f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward"))


class Rounding(TorchDispatchMode):
    """Counts the results that it has moved."""

    moved = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::").removesuffix("_out")
        if name in ROUNDED or name.removesuffix("_") in ROUNDED:
            for x in found if isinstance(found, (tuple, list)) else (found,):
                if type(x) is Tensor and x.dtype in BITS and x.device.type == "cpu" and x.numel():
                    self.move_(x)
        return found

    def move_(self, x: Tensor) -> None:
        bits = x.detach().contiguous().view(BITS[x.dtype])
        chosen = (((bits ^ (bits >> 7)) * 2654435761 + SEED) >> 11) % 3 - 1  # -1, 0 or 1
        # The bits of a number and of the next one differ by 1, in either sign. 0 stays, and what is not finite.
        ordinary = (x != 0) & x.isfinite()
        x.copy_(torch.where(ordinary, (bits + chosen.to(bits.dtype)).view(x.dtype), x))
        self.moved += x.numel()
