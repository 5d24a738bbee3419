"""How many programs of a kernel to start."""

import torch
import triton

from ngpt_train.kernels.dispatch import interpreted

INTERPRETED = 3  # programs in the interpreter: few, because they run one after the other, but more than one


def programs(rows: int, column_blocks: int, warps_per_sm: int, num_warps: int, device: torch.device) -> int:
    """Number of programs that share `rows` for each block of columns: about as many as run at once, and at most `rows`.

    Each walks over many rows, so that it reads a vector once, and leaves one partial sum of the vector's gradient.
    """
    if interpreted():
        return min(rows, INTERPRETED)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, triton.cdiv(processors * warps_per_sm // num_warps, column_blocks))
