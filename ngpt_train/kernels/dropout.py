"""Dropout. Its random numbers are a function of the seed, the step, the row and the place alone.

A row of a batch has the same mask on any number of ranks, in any micro batch, on CPUs and GPUs, compiled and not, and
when activation checkpointing computes it again. torch's generators can promise none of that: they count calls.

The numbers are a tree of SplitMix64's mix. A seed s gives the numbers mix(s XOR n), n = 0, 1, ..., which may be seeds
again: the run's seed gives a seed for each step, a step for each row, a row for each place in the model
(models/layers/dropout.py), a place for each token, and a token gives a number for each channel. All arithmetic is int64
modulo 2^64, which is exact everywhere.
"""

import torch
from torch import Tensor


def signed(n: int) -> int:
    """n modulo 2^64 as an int64, from -2^63 to 2^63 - 1."""
    return (n + 2**63) % 2**64 - 2**63


GOLDEN, FIRST, SECOND = (signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(x: Tensor) -> Tensor:
    """SplitMix64's next number from its state x, int64 (Steele et al. 2014): one to one, no pattern for 0, 1, ..."""
    x = x + GOLDEN
    x = (x ^ shifted(x, 30)) * FIRST
    x = (x ^ shifted(x, 27)) * SECOND
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted right, with zeros from the left: >> alone would repeat the sign of an int64."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def numbers(seeds: Tensor, n: int) -> Tensor:
    """The first n numbers of each seed: int64 `(...)` -> `(..., n)`."""
    # XOR, not a sum: torch.compile would take a sum with arange for an index, and compute it in 32 bits.
    return mix(seeds[..., None] ^ torch.arange(n, device=seeds.device))


def row_seeds(seed: int, step: int, rows: Tensor) -> Tensor:
    """The seeds of rows, int64 `(B,)`. rows `(B,)`: their numbers in the batch of all ranks. step: steps before it."""
    of_step = mix(mix(torch.tensor(seed)) ^ step)
    return mix(of_step ^ rows)


def kept(p: float, seeds: Tensor, shape: torch.Size) -> Tensor:
    """bool of this shape `(B, ...)`: true for an element that stays, with probability 1 - p. seeds `(B,)`. An element
    is a function of its row's seed and of its place in the row."""
    for size in shape[1:]:
        seeds = numbers(seeds, size)
    # Uniform from -2^63 to 2^63 - 1. The probability is exact to 2^-53, the precision of p.
    return seeds >= signed(int(p * 2**64) - 2**63)


def dropout(x: Tensor, p: float, seeds: Tensor) -> Tensor:
    """x / (1 - p) where an element is kept, else 0: x `(B, ...)` -> the same shape and dtype. p: in [0, 1), the
    probability of 0. seeds: int64 `(B,)`. The backward pass keeps a bool per element."""
    return torch.where(kept(p, seeds, x.shape), x * (1 / (1 - p)), 0)
