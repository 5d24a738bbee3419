"""What a GPU takes by itself, and what it reaches at the most: copies and matrix products."""

from __future__ import annotations

import statistics

import torch

from ngpt_train.bench.interleaved import Run

SLEEP_CYCLES = 20_000_000  # 10 ms or so, in which the host launches what is timed
CALLS = 5  # in one measurement
ROUNDS = 5


def on_device(run: Run) -> tuple[float, float]:
    """Seconds that the GPU takes for a run; it sleeps while the host launches, so that it never waits for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    units = sum(run() for _ in range(CALLS))
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / CALLS, units / CALLS


def copy_ceiling(device: torch.device, gigabytes: float = 4.0) -> float:
    """GB/s, read and written, of a large copy within the GPU: what no kernel that moves memory exceeds by much."""
    source = torch.zeros(int(gigabytes * 2**30) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)

    def copy() -> float:
        target.copy_(source)
        return 2 * source.nbytes

    return 1e-9 * rate(copy)


def product_ceiling(device: torch.device, n: int, k: int, m: int, transposed: bool = False) -> float:
    """FLOP/s of a bf16 product `(n, k) (k, m)` of random numbers; transposed: the second is stored as `(m, k)`."""
    a = torch.randn(n, k, device=device).to(torch.bfloat16)
    b = torch.randn(m, k, device=device).to(torch.bfloat16).t() if transposed else None
    if b is None:
        b = torch.randn(k, m, device=device).to(torch.bfloat16)
    out = torch.empty(n, m, dtype=torch.bfloat16, device=device)

    def product() -> float:
        torch.mm(a, b, out=out)
        return 2 * n * k * m

    return rate(product)


def rate(run: Run) -> float:
    """Units a second, the median of a few after one untimed."""
    on_device(run)
    rates = []
    for _ in range(ROUNDS):
        seconds, units = on_device(run)
        rates.append(units / seconds)
    return statistics.median(rates)
