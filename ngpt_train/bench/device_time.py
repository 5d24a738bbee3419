"""Times on the GPU's own clock, and a GPU's ceilings: the rate of a copy and of matrix products."""

from __future__ import annotations

import statistics

import torch

from ngpt_train.bench.interleaved import Run
from ngpt_train.kernels.check import timing

CALLS = 5  # of the run in one measurement
ROUNDS = 5


def on_device(run: Run) -> tuple[float, float]:
    """Seconds that the GPU takes for one call of `run`, and its units; means of CALLS calls."""
    units: list[float] = []
    seconds = timing.on_device(lambda: units.append(run()), CALLS)
    return seconds, sum(units) / CALLS


def copy_ceiling(device: torch.device, gigabytes: float = 4.0) -> float:
    """GB/s, reads and writes together, of a large copy within the GPU, which no kernel exceeds by much."""
    # Random values, because some devices move zeros faster.
    source = torch.empty(int(gigabytes * 2**30) // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)

    def copy() -> float:
        target.copy_(source)
        return 2 * source.nbytes

    return 1e-9 * rate(copy)


def product_seconds(device: torch.device, n: int, k: int, m: int, stored: str = "nn") -> float:
    """Seconds of a bf16 matrix product `(n, k) (k, m)`.

    stored: a letter for each factor, "n" where memory holds it as it is, "t" where memory holds its transpose.
    """

    def factor(rows: int, columns: int, how: str) -> torch.Tensor:
        if how == "t":
            return torch.randn(columns, rows, device=device, dtype=torch.bfloat16).t()
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    a, b = factor(n, k, stored[0]), factor(k, m, stored[1])
    out = torch.empty(n, m, dtype=torch.bfloat16, device=device)

    def product() -> float:
        torch.mm(a, b, out=out)
        return 1

    return 1 / rate(product)


def rate(run: Run) -> float:
    """Units per second on the GPU: the median of ROUNDS measurements, after one that does not count."""
    on_device(run)
    rates = []
    for _ in range(ROUNDS):
        seconds, units = on_device(run)
        rates.append(units / seconds)
    return statistics.median(rates)
