"""Times on the GPU's own clock, and a GPU's ceilings: the rate of a copy and of matrix products."""

from __future__ import annotations

import statistics

import torch

from ngpt_train.bench.interleaved import Run

SLEEP_CYCLES = 20_000_000  # about 10 ms, in which the host launches the kernels that are timed
CALLS = 5  # of the run in one measurement
ROUNDS = 5


def on_device(run: Run) -> tuple[float, float]:
    """Seconds that the GPU takes for one call of `run`, and its units; means of CALLS calls.

    The GPU sleeps while the host launches the kernels, so that it never waits for the host.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    units = sum(run() for _ in range(CALLS))
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / CALLS, units / CALLS


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
