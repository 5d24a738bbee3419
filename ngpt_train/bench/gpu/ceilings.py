"""A GPU's ceilings: the rate of a copy, and of the matrix products of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ngpt_train.bench.device_time import copy_ceiling, product_seconds
from ngpt_train.bench.gpu.steps import SIZES

TOKENS = 32_768  # rows of a product's input: those of a step of 8 rows of 4096 tokens


def ceilings(device: torch.device, say: Callable[[str], None]) -> dict[str, float | dict[str, float]]:
    """By name: GB/s of a copy, TFLOP/s of bf16 products, and the milliseconds of all products of a step."""
    copy = copy_ceiling(device)
    say(f"copy within the device: {copy:.0f} GB/s")
    n = 8192
    flops = 2 * n**3 / product_seconds(device, n, n, n)
    say(f"bf16 product of {n}^3: {flops / 1e12:.0f} TFLOP/s")
    found: dict[str, float | dict[str, float]] = {"copy_gb_per_s": copy, "product_tflop_per_s": flops / 1e12}
    for size in ("0.5b", "1b"):
        found |= products(size, device, say)
    return found


def products(size: str, device: torch.device, say: Callable[[str], None]) -> dict[str, float | dict[str, float]]:
    """The matrix products of a step of TOKENS tokens, forward and backward: TFLOP/s of each, milliseconds of all.

    W_o and W_down are stored as `(in, d_model)`, the other matrices as `(out, d_model)` (docs/decisions/0002).
    """
    d, n_layers, _, m, vocab = SIZES[size]
    # Name, d_in, d_out, whether stored as (in, out), how often a step has it.
    shapes = [
        ("qkv", d, 3 * d, False, n_layers),
        ("o", d, d, True, n_layers),
        ("o as nn.Linear", d, d, False, 0),
        ("gate and up", d, 2 * m, False, n_layers),
        ("down", m, d, True, n_layers),
        ("head", d, vocab, False, 1),
    ]
    found: dict[str, float | dict[str, float]] = {}
    total = 0.0
    for name, d_in, d_out, transposed, times in shapes:
        seconds = {
            "forward": product_seconds(device, TOKENS, d_in, d_out, "nn" if transposed else "nt"),
            "by input": product_seconds(device, TOKENS, d_out, d_in, "nt" if transposed else "nn"),
            "by weight": product_seconds(
                device, *((d_in, TOKENS, d_out) if transposed else (d_out, TOKENS, d_in)), "tn"
            ),
        }
        total += times * sum(seconds.values())
        rates = {which: 2e-12 * TOKENS * d_in * d_out / taken for which, taken in seconds.items()}
        found[f"{size} {name}, TFLOP/s"] = rates
        say(f"{size} {name}: " + ", ".join(f"{which} {rate:.0f}" for which, rate in rates.items()) + " TFLOP/s")
    found[f"{size} products, ms"] = 1e3 * total
    say(f"{size}: products of a step of {TOKENS} tokens: {1e3 * total:.1f} ms")
    return found
