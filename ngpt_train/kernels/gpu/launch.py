"""How kernels over rows are launched."""

import functools

import torch
from torch import Tensor

# Programs that walk over rows, for each multiprocessor: enough to hide the latency of memory, and few partial sums.
PROGRAMS_PER_SM = 4
# In Triton's interpreter: a number that does not divide most others.
PROGRAMS_INTERPRETED = 3


def as_rows(x: Tensor) -> Tensor:
    """`(..., D)` -> `(N, D)` with neighbours in memory along a row; a copy only where it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def programs(n_rows: int, device: torch.device) -> int:
    """Programs that share `n_rows` rows between them."""
    return max(
        1, min(n_rows, PROGRAMS_PER_SM * _multiprocessors(device) if device.type == "cuda" else PROGRAMS_INTERPRETED)
    )


def warps(block: int) -> int:
    """For a row of `block` elements that is held in registers: 8 elements a thread or more."""
    return max(1, min(16, block // 256))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
