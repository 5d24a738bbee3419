"""A keyed permutation of the rows, evaluated anywhere in O(1) time and memory.

Row number x of n is written as two digits (left, right) with left < a, right < b and a * b just above n. A Feistel
network of eight rounds adds a keyed hash of one digit to the other, which permutes the a * b numbers for any hash. A
result of n or more is permuted again until it is below n ("cycle walking"), so the map stays one-to-one. With
a = ceil(sqrt(n)) less than one number in sqrt(n) has to walk.
"""

import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
FEW = 8  # below so many rows, eight rounds prefer some orders
# Constants of the splitmix64 generator: the odd 64-bit golden ratio and its two multipliers.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def shuffled(k: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """The rows (N,) at positions `k` (N,) >= 0 of an endless sequence that shuffles range(n) anew in each epoch.
    Positions e * n to (e + 1) * n - 1 hold every row once. The result depends on (k, n, seed) alone."""
    if n >= FEW:
        return permuted(k, n, seed)
    orders = {epoch: keyed_order(n, seed, epoch) for epoch in set((k // n).tolist())}
    return np.array([orders[position // n][position % n] for position in k.tolist()], np.int64)


def permuted(k: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """`shuffled`, but below FEW rows some orders are more frequent than others."""
    position = k.astype(np.uint64)
    epoch, x = position // np.uint64(n), position % np.uint64(n)
    # Arrays throughout: numpy wraps arrays modulo 2**64 in silence, but warns for scalars.
    key = mix(mix(np.array([seed % 2**64], np.uint64)) + epoch * GOLDEN)
    x = _permute(x, n, key)
    while (outside := x >= n).any():
        x[outside] = _permute(x[outside], n, key[outside])
    return x.astype(np.int64)


def keyed_hash(*keys: int) -> int:
    """A random-looking 63-bit number from all `keys` in their order."""
    h = 0
    for key in keys:
        # `mix` in Python's integers, which are much faster for single numbers.
        h = (h * int(MULTIPLIERS[0]) + key + int(GOLDEN)) % 2**64
        h = (h ^ (h >> 30)) * int(MULTIPLIERS[0]) % 2**64
        h = (h ^ (h >> 27)) * int(MULTIPLIERS[1]) % 2**64
        h ^= h >> 31
    return h >> 1


def keyed_order(n: int, *keys: int) -> list[int]:
    """range(n) in a random-looking order from all `keys`. All n numbers are in memory."""
    if n == 1:  # nothing to order
        return [0]
    return np.argsort(uniform(np.arange(n), keyed_hash(*keys)), kind="stable").tolist()


def uniform(numbers: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """A random-looking number in [0, 1) for each of `numbers`, (N,)."""
    words = mix(mix(np.array([seed % 2**64], np.uint64)) + mix(numbers.astype(np.uint64) + GOLDEN))
    return (words >> np.uint64(11)).astype(np.float64) / 2**53


def _permute(x: NDArray[np.uint64], n: int, key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    width = math.isqrt(n - 1) + 1
    a, b = np.uint64(width), np.uint64(-(-n // width))
    left, right = x // b, x % b
    for i in range(ROUNDS):
        key = mix(key + GOLDEN)
        if i % 2 == 0:
            left = (left + mix(key + right * GOLDEN) % a) % a
        else:
            right = (right + mix(key + left * GOLDEN) % b) % b
    return left * b + right


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finaliser, a bijection of 64-bit words. Each input bit flips half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))
