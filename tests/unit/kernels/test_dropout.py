"""Dropout's masks: the numbers, their dependencies, their statistics, and attention with them."""

import math

import pytest
import torch
from torch import Tensor

from ngpt_train.kernels.attention import attention, attention_with_dropout
from ngpt_train.kernels.dropout import dropout, kept, mix, numbers, row_seeds

P = 0.3
ROWS, T, D = 16, 64, 128


def seeds(rows: int = ROWS, seed: int = 0, step: int = 0) -> Tensor:
    return row_seeds(seed, step, torch.arange(rows))


def splitmix64(state: int) -> int:
    """The published algorithm, in Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_numbers_are_those_of_splitmix64() -> None:
    """Caught: a shift that repeats the sign, a product that is not modulo 2^64."""
    states = [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF, *(splitmix64(n) for n in range(100))]
    x = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    assert [int(n) % 2**64 for n in mix(x)] == [splitmix64(state) for state in states]
    assert int(mix(torch.tensor(0))) % 2**64 == 0xE220A8397B1DCDAF  # the first output of seed 0 that is printed widely


def test_an_element_is_a_function_of_row_token_and_channel() -> None:
    """Written out for single elements; the tree that the docstring describes, from the run's seed down."""
    mask = kept(P, seeds(seed=7, step=5), torch.Size((ROWS, T, D)))
    for row, token, channel in ((0, 0, 0), (3, 10, 127), (15, 63, 1)):
        number = 7
        for n in (None, 5, row, token, channel):
            number = splitmix64(number if n is None else number ^ n)
        signed = number - 2**64 if number >= 2**63 else number
        assert bool(mask[row, token, channel]) == ((signed + 2**63) / 2**64 >= P)


def test_rows_in_any_grouping() -> None:
    """Caught: a mask that depends on a row's place in the micro batch, or on the length of the row."""
    whole = kept(P, seeds(), torch.Size((ROWS, T, D)))
    for some in (torch.tensor([5]), torch.tensor([9, 2, 11])):
        part = row_seeds(0, 0, some)
        assert torch.equal(kept(P, part, torch.Size((len(some), T, D))), whole[some])
        assert torch.equal(kept(P, part, torch.Size((len(some), T // 2, D))), whole[some, : T // 2])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_expectation_and_variance(p: float) -> None:
    """Each element is 0 or 1 / (1 - p), with mean 1 and variance p / (1 - p): within 5 standard errors, in all, in each
    row, in each channel. Caught: a threshold of another probability, a missing factor."""
    y = dropout(torch.ones(ROWS, T, D, dtype=torch.float64), p, seeds())
    assert set(y.unique().tolist()) == {0.0, 1 / (1 - p)}
    sigma = math.sqrt(p / (1 - p))
    for dims in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):
        means = y.mean(dims)
        assert (means - 1).abs().max() < 5 * sigma / math.sqrt(y.numel() / means.numel())
    assert float(y.var()) == pytest.approx(sigma**2, rel=0.05 if p > 0.01 else 0.15)


def test_the_probability_is_exact() -> None:
    """The number just below p 2^64 is dropped, the one at it is kept: p is not rounded to 2^-24."""
    threshold = int(P * 2**64) - 2**63
    # Without further dimensions the seeds are the numbers.
    assert kept(P, torch.tensor([threshold - 1, threshold]), torch.Size((2,))).tolist() == [False, True]


def test_no_correlation() -> None:
    """Below 5 standard errors between masks of other seeds, steps, rows, layers and places, between neighbouring tokens
    and between neighbouring channels. Caught: a step or a row that is added to the seed, a mask that is shared or
    shifted."""
    layers = numbers(seeds(), 3)  # (ROWS, 3)
    places = [mix(layers[:, 0] ^ place) for place in (0, 1, 2)]
    masks = [seeds(), seeds(seed=1), seeds(step=1), seeds(seed=1, step=1), seeds().roll(1), *layers.T[1:], *places]
    values = [kept(P, x, torch.Size((ROWS, T, D))).double() - (1 - P) for x in masks]
    flat = torch.stack([value.flatten() for value in values])
    n = flat.shape[1]
    correlation = flat @ flat.T / (n * P * (1 - P))
    assert (correlation - torch.eye(len(flat))).abs().max() < 5 / math.sqrt(n)
    one = values[0]
    for shifted in (one.roll(1, 1), one.roll(1, 2), one.roll((1, 1), (1, 2)), one.roll(1, 0)):
        assert abs(float((one * shifted).mean())) / (P * (1 - P)) < 5 / math.sqrt(n)
    # Of two channels over all tokens, the largest of D (D - 1) / 2 = 8,128 coefficients.
    channels = one.flatten(0, 1)
    pairs = (channels.T @ channels / (len(channels) * P * (1 - P))).triu(1)
    assert pairs.abs().max() < 6 / math.sqrt(len(channels))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_is_the_mask(dtype: torch.dtype) -> None:
    """Caught: a gradient through another mask; a product that autograd keeps instead of a bool."""
    x = torch.randn(4, T, D, dtype=dtype, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = dropout(x, P, seeds(4))
    assert y.dtype == dtype
    assert [t.dtype for t in saved if t.numel() > 1] == [torch.bool]
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    mask = kept(P, seeds(4), x.shape)
    assert torch.equal(dx, torch.where(mask, g * (1 / (1 - P)), 0))
    assert torch.equal(y, torch.where(mask, x * (1 / (1 - P)), 0))


@pytest.mark.parametrize(("masked", "kv_heads"), [("causal", 4), ("none", 2), ("documents", 2), ("keys", 4)])
def test_attention(masked: str, kv_heads: int) -> None:
    """Against sums over keys in fp64, head by head; its gradient too. Caught: dropout before the softmax or of the
    values, another head's keys, a mask turned round, a future token."""
    torch.manual_seed(0)
    B, H, length, d, scale = 2, 4, 10, 8, 0.7
    q, k, v = (torch.randn(B, length, heads, d, dtype=torch.float64) for heads in (H, kv_heads, kv_heads))
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = torch.arange(length) // 4 == torch.arange(length)[:, None] // 4
    sees = {"documents": (causal & same)[None, None], "keys": (torch.arange(length) < 7)[None, None, None, :]}
    mask = sees.get(masked)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attention_with_dropout(*leaves, scale, masked == "causal", mask, P, seeds(B))
    visible = causal if masked == "causal" else torch.ones_like(causal) if mask is None else mask[0, 0]
    others = [x.clone().requires_grad_() for x in (q, k, v)]
    drops = kept(P, seeds(B), torch.Size((B, H, length, length)))
    rows = []
    for b in range(B):
        for h in range(H):
            group = h * kv_heads // H
            weights = (scale * others[0][b, :, h] @ others[1][b, :, group].T).exp() * visible
            weights = weights / weights.sum(1, keepdim=True) * drops[b, h] / (1 - P)
            rows.append(weights @ others[2][b, :, group])
    expected = torch.stack(rows).view(B, H, length, d).transpose(1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(y)
    for found, other in zip(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, others, g), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-11, atol=1e-12)
    almost_none = attention_with_dropout(q, k, v, scale, masked == "causal", mask, 2.0**-60, seeds(B))
    torch.testing.assert_close(almost_none, attention(q, k, v, scale, masked == "causal", mask), rtol=1e-12, atol=1e-12)


@pytest.mark.exhaustive
def test_compiled_masks_have_the_same_bits() -> None:
    """Caught: an index of 32 bits, a product that saturates, a shift of another kind in compiled code."""
    torch._dynamo.reset()
    compiled = torch.compile(kept, dynamic=False)
    for shape in ((ROWS, T, D), (3, 5, 7, 11), (2, 70_000)):
        size = torch.Size(shape)
        assert torch.equal(compiled(P, seeds(shape[0]), size), kept(P, seeds(shape[0]), size))
