"""Launch sizes of kernels that work row by row."""

import torch
import triton
from torch import Tensor

# Programs on a CPU, in Triton's interpreter: few, because they run one after the other; several, so that it adds sums.
INTERPRETED = 3


def as_rows(x: Tensor) -> Tensor:
    """x `(..., D)` as `(N, D)` with contiguous rows; a copy only where the strides of x require one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def programs(rows: int, column_blocks: int, warps_per_sm: int, num_warps: int, device: torch.device) -> int:
    """Programs that share `rows` for each block of columns: about as many as run at once, at most one per row. Each
    goes through many rows, so that it reads the scale vector once and writes one partial sum of its gradient."""
    if device.type == "cpu":
        return min(rows, INTERPRETED)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, triton.cdiv(processors * warps_per_sm // num_warps, column_blocks))
