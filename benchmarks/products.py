"""Times the matrix products of a step of the paper's 0.5B and 1B in bf16, beside a product of 8192 by 8192 matrices.

    python -m benchmarks.products [--out FILE]          # a GPU, with torch alone
    python -m benchmarks.products --sizes debug --device cpu

W_o and W_down are stored as `(in, d_model)`, the other matrices as `(out, d_model)` (docs/decisions/0002). The rate is
FLOP/s, the ratio that of the times for as many FLOPs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.common import Entry, Run, default_device, interleaved, main, on_device
from benchmarks.paper_steps import SIZES

TOKENS = 32_768  # rows of a product's input: those of a step of 8 rows of 4096 tokens
ROUNDS = 5


def bench(sizes: str, device: str) -> Iterator[Entry]:
    """Entries of the forward pass of each product, and of those that its two gradients are."""
    on = torch.device(device)
    n, tokens = (8192, TOKENS) if on.type == "cuda" else (64, 64)
    for size in sizes.split(","):
        d, _, _, m, vocab = SIZES[size]
        # Name, d_in, d_out, whether stored as (in, out).
        for name, d_in, d_out, transposed in (
            ("qkv", d, 3 * d, False),
            ("o", d, d, True),
            ("gate and up", d, 2 * m, False),
            ("down", m, d, True),
            ("head", d, vocab, False),
        ):
            shape = (d_in, tokens, d_out) if transposed else (d_out, tokens, d_in)
            runs = {
                f"{n} cubed": product(on, n, n, n, "nn"),
                "forward": product(on, tokens, d_in, d_out, "nn" if transposed else "nt"),
                "by input": product(on, tokens, d_out, d_in, "nt" if transposed else "nn"),
                "by weight": product(on, *shape, "tn"),
            }
            yield from interleaved(runs, f"{n} cubed", ROUNDS, "FLOP", on_device(on), f"{size} {name}: ")


def product(device: torch.device, n: int, k: int, m: int, stored: str) -> Run:
    """A run of a bf16 product `(n, k) (k, m)`, which returns its FLOPs.

    stored: a letter for each factor, "n" where memory holds it as it is, "t" where memory holds its transpose.
    """

    def factor(rows: int, columns: int, how: str) -> torch.Tensor:
        if how == "t":
            return torch.randn(columns, rows, device=device, dtype=torch.bfloat16).t()
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    a, b = factor(n, k, stored[0]), factor(k, m, stored[1])
    out = torch.empty(n, m, dtype=torch.bfloat16, device=device)

    def run() -> float:
        torch.mm(a, b, out=out)
        return 2.0 * n * k * m

    return run


if __name__ == "__main__":
    sys.exit(main(__doc__, bench, overrides=False, sizes="0.5b,1b", device=default_device()))
