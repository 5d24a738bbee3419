"""Rows and their order: every row once an epoch, the same for any number of ranks and any restart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ngpt_train.config.keys import DataError
from ngpt_train.data import LoaderState, Rows, Tokens, TrainLoader, validation_rows
from ngpt_train.data.permutation import shuffled
from ngpt_train.data.rows import NextToken

CONTEXT = 5


def tokens(n: int = 1000, cuts: tuple[int, ...] = (3, 4, 500)) -> Tokens:
    """The ids 0 to n - 1, in shards that end at `cuts`."""
    return Tokens("train", Path("tokens"), np.split(np.arange(n, dtype=np.uint16), cuts))


def rows() -> Rows:
    return NextToken(tokens(), CONTEXT)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000, 4097])
def test_every_row_once_per_epoch(n: int) -> None:
    positions = np.arange(3 * n)
    order = shuffled(positions, n, seed=5)
    for epoch in order.reshape(3, n):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(n))
    in_parts = np.concatenate([shuffled(part, n, seed=5) for part in np.array_split(positions, 11)])
    np.testing.assert_array_equal(in_parts, order)
    if n > 100:
        assert (order[:n] != order[n : 2 * n]).mean() > 0.9
        assert (order[:n] != shuffled(positions[:n], n, seed=6)).mean() > 0.9


def test_small_permutations_are_all_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(3000):
        order = tuple(shuffled(np.arange(3), 3, seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    # Six counts of mean 500: the statistic exceeds 20.5 once in a thousand random sets.
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5


def test_shuffle_looks_random() -> None:
    n = 1000
    orders = np.array([shuffled(np.arange(n), n, seed) for seed in range(200)])
    # Where a row goes: 200 seeds x 1000 rows over 10 x 10 cells of (position, row), 2000 expected in each.
    cells = np.histogram2d(np.tile(np.arange(n), 200), orders.ravel(), bins=10)[0]
    assert ((cells - 2000) ** 2 / 2000).sum() < 150  # 81 degrees of freedom
    # Neighbours stay together as often as chance has it, and neighbouring seeds agree as often: 200 times.
    assert 130 < (np.diff(orders, axis=1) == 1).sum() < 280
    assert 130 < (orders[1:] == orders[:-1]).sum() < 280
    assert abs(np.corrcoef(np.arange(n), orders.mean(axis=0))[0, 1]) < 0.12


def test_rows_cover_every_token_as_a_target_once() -> None:
    data = tokens()
    found = data.rows(np.arange(data.n_rows(CONTEXT)), CONTEXT)
    assert found.dtype == np.int64
    assert found.shape == (199, CONTEXT + 1)
    np.testing.assert_array_equal(found[:, 1:].ravel(), np.arange(1, 199 * CONTEXT + 1))
    np.testing.assert_array_equal(found[:, 0], np.arange(199) * CONTEXT)
    np.testing.assert_array_equal(data.row(99, CONTEXT), np.arange(495, 501))  # across a shard border


def test_too_short_for_a_row() -> None:
    data = tokens(5, cuts=(2,))
    assert data.n_rows(CONTEXT) == 0
    with pytest.raises(DataError, match=r"train split has 5 tokens.*model\.context \+ 1 = 6"):
        NextToken(data, CONTEXT)


def steps(n: int, world_size: int, state: LoaderState | None = None) -> tuple[list[torch.Tensor], LoaderState]:
    """Global batches (batch_rows, context + 1) of n steps, put together from all ranks."""
    loaders = [TrainLoader(rows(), 24, 24 // world_size // 2, 7, r, world_size, state) for r in range(world_size)]
    batches = []
    for _ in range(n):
        items = [next(loader) for loader in loaders]
        assert len({json.dumps(after) for _, after in items}) == 1
        micro = [pair for micro_batches, _ in items for pair in micro_batches]
        for inputs, targets in micro:
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.is_contiguous()
            assert targets.is_contiguous()
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
        batches.append(torch.cat([torch.cat([inputs, targets[:, -1:]], 1) for inputs, targets in micro]))
        state = items[0][1]
    assert state is not None
    return batches, state


def test_batches_do_not_depend_on_ranks_or_restarts() -> None:
    expected, end = steps(20, world_size=1)
    assert end == {"rows": 480}  # two epochs of 199 rows and some
    first, state = steps(7, world_size=4)
    second, state = steps(4, world_size=2, state=json.loads(json.dumps(state)))
    third, state = steps(9, world_size=3, state=state)
    assert state == end
    for got, want in zip(first + second + third, expected, strict=True):
        assert torch.equal(got, want)
    starts = torch.cat(expected)[:, 0] // CONTEXT
    for epoch in (starts[:199], starts[199:398]):
        assert sorted(epoch.tolist()) == list(range(199))


def test_batch_must_divide() -> None:
    with pytest.raises(ValueError, match="24 rows"):
        TrainLoader(rows(), 24, 5, seed=0, world_size=2)


def test_validation_rows_are_fixed_and_different() -> None:
    chosen = validation_rows(rows(), 50, seed=3)
    assert len(set(chosen.tolist())) == 50
    np.testing.assert_array_equal(chosen, validation_rows(rows(), 50, seed=3))
    assert set(chosen.tolist()) != set(validation_rows(rows(), 50, seed=4).tolist())
    np.testing.assert_array_equal(validation_rows(rows(), 10_000, seed=3), np.arange(199))
