"""How kernels over rows are launched."""

import torch
import triton
from torch import Tensor

from ngpt_train.kernels.dispatch import interpreted

INTERPRETED = 3  # programs in the interpreter: few, because they run one after the other, but more than one


def as_rows(x: Tensor) -> Tensor:
    """`(..., D)` -> `(N, D)` with neighbours in memory along a row; a copy only where it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def warps(block: int) -> int:
    """For a row of `block` elements that is held in registers: 8 elements a thread, which are 16 bytes of bf16."""
    return max(1, min(16, block // 256))


def programs(rows: int, column_blocks: int, warps_per_sm: int, num_warps: int, device: torch.device) -> int:
    """Number of programs that share `rows` for each block of columns: about as many as run at once, and at most `rows`.

    Each walks over many rows, so that it reads a vector once, and leaves one partial sum of the vector's gradient.
    """
    if interpreted():
        return min(rows, INTERPRETED)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, triton.cdiv(processors * warps_per_sm // num_warps, column_blocks))
