"""Rows and their order: every row once an epoch, the same for any number of ranks and any restart."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data import TrainLoader, merged
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.loader import PreparedReader, data_hash, hash_of_rows
from ngpt_train.data.permutation import shuffled
from ngpt_train.data.rows import BestFit, NextToken, RowFormat, Rows, Span, best_fit, rows_of
from ngpt_train.data.streamed_text import StreamSettings
from ngpt_train.models.gpt.keys import GPTConfig

CONTEXT, EOS = 5, 4321


def tokens(n: int = 1000, cuts: tuple[int, ...] = (3, 4, 500)) -> Tokens:
    """The ids 0 to n - 1, in shards cut at `cuts`."""
    return Tokens("train", Path("tokens"), np.split(np.arange(n, dtype=np.uint16), cuts), EOS)


def rows() -> Rows:
    return NextToken(tokens(), RowFormat(CONTEXT, EOS))


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


@pytest.mark.parametrize("n", [3, 5, 6, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_orders_of_few_rows_are_all_as_likely(n: int) -> None:
    """Over seeds, and over the epochs of one. Caught: a Feistel network of few numbers, which prefers some orders."""
    factorial = math.factorial(n)
    for orders in (
        shuffled(np.arange(30 * factorial * n), n, seed=1).reshape(-1, n),
        np.array([shuffled(np.arange(n), n, seed) for seed in range(min(30 * factorial, 6000))]),
    ):
        counts = np.unique(orders, axis=0, return_counts=True)[1]
        expected = len(orders) / factorial
        chi2 = ((counts - expected) ** 2 / expected).sum() + (factorial - len(counts)) * expected
        # Mean factorial - 1, variance twice that: five deviations are exceeded once in a million random sets.
        assert abs(chi2 - factorial + 1) < 5 * math.sqrt(2 * factorial)


def test_the_order_of_more_rows_is_what_it_was() -> None:
    """Runs go on with it, and so do windows of few shards. The numbers are older than the shuffle of few rows."""
    assert shuffled(np.arange(10), 10, 5).tolist() == [8, 3, 7, 9, 6, 5, 0, 4, 2, 1]
    assert StreamSettings(1, 7, 5, RowFormat(CONTEXT, EOS)).shards(7, 0, 0) == [1, 0, 3, 4, 6, 5, 2]


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


@pytest.mark.parametrize("n", [1000, 996, 6, 9])
def test_every_token_is_a_target_once(n: int) -> None:
    """Also in the last row, which is whole and begins earlier. eos opens the first document."""
    data = NextToken(tokens(n), RowFormat(CONTEXT, EOS))
    found, targets = data.batch(np.arange(len(data)))
    assert found.dtype == targets.dtype == np.int64
    assert found.shape == targets.shape == (math.ceil(n / CONTEXT), CONTEXT)
    np.testing.assert_array_equal(targets[targets != -100], np.arange(n))
    np.testing.assert_array_equal(found[0], [EOS, *range(CONTEXT - 1)])
    np.testing.assert_array_equal(found[1:, 1:], found[1:, :1] + np.arange(1, CONTEXT))
    counted = targets != -100
    np.testing.assert_array_equal(targets[counted][1:], found[counted][1:] + 1)
    np.testing.assert_array_equal(data.batch(np.array([len(data) - 1, 0]))[1], targets[[-1, 0]])


def test_too_short_for_a_row() -> None:
    data = tokens(5, cuts=(2,))
    with pytest.raises(DataError, match=r"train split has 5 tokens.*model\.context \+ 1 = 6"):
        rows_of(data, Config(model=GPTConfig(context=CONTEXT)))


def documents(seed: int = 0, n: int = 300) -> tuple[Tokens, list[list[int]]]:
    """Documents of 1 to 30 ids above EOS, and EOS, in two shards."""
    generator = np.random.default_rng(seed)
    made = [
        [*(EOS + 1 + generator.integers(900, size=length)).tolist(), EOS] for length in generator.integers(30, size=n)
    ]
    shards = [np.concatenate(part).astype(np.uint16) for part in (made[: n // 3], made[n // 3 :])]
    offsets = [np.cumsum([0, *map(len, part)]) for part in (made[: n // 3], made[n // 3 :])]
    return Tokens("train", Path("tokens"), shards, EOS, offsets), made


def test_best_fit_cuts_no_document_that_fits() -> None:
    """Caught: a rest that does not come first in its row; padding that is predicted; a row's last eos that opens."""
    data, made = documents()
    context = 12
    rows = BestFit(data, RowFormat(context, EOS, pads=True, document_mask=True))
    inputs, targets, doc_ids = rows.batch(np.arange(len(rows)))
    found: list[list[int]] = []
    for row, predicted, ids in zip(inputs, targets, doc_ids, strict=True):
        counted = predicted != -100
        assert counted.tolist() == sorted(counted.tolist(), reverse=True)
        assert (ids[~counted] == -1).all()
        # A target is the next input; eos opens the next document.
        np.testing.assert_array_equal(row[counted][1:], predicted[counted][:-1])
        np.testing.assert_array_equal(np.diff(ids[counted]), row[counted][1:] == EOS)
        found += [predicted[ids == number].tolist() for number in np.unique(ids[counted])]
    whole = [document for document in made if len(document) <= context]
    assert 0 < len(whole) < len(made)
    assert Counter(map(tuple, whole)) <= Counter(map(tuple, found))
    assert sorted(targets[targets != -100].tolist()) == sorted(i for document in made for i in document)
    assert (targets == -100).mean() < 0.2  # most are longer than a row


@pytest.mark.parametrize("length", [1, 3, 5, 6, 12, 13, 20, 40])
def test_best_fit_of_a_file_that_ends_within_a_document(length: int) -> None:
    """Caught: an id of it that the eos of another document overwrites."""
    _, made = documents(n=40)
    ids = np.r_[np.concatenate(made), np.arange(length) + 2 * EOS].astype(np.uint16)
    data = Tokens("train", Path("tokens"), [ids], EOS)
    rows = BestFit(data, RowFormat(12, EOS, pads=True))
    targets = rows.batch(np.arange(len(rows)))[1]
    assert sorted(targets[targets != -100].tolist()) == sorted(ids.tolist())


def test_best_fit_leaves_the_least_room() -> None:
    """Caught: the row with the most room, which wastes more and gives other rows than before."""
    assert best_fit([5, 7, 3, 6, 4], 10) == [
        [Span(1, 0, 7), Span(2, 0, 3)],
        [Span(3, 0, 6), Span(4, 0, 4)],
        [Span(0, 0, 5)],
    ]
    assert best_fit([8, 6, 2], 10) == [[Span(0, 0, 8), Span(2, 0, 2)], [Span(1, 0, 6)]]


def test_document_mask_of_stretches() -> None:
    data, _ = documents()
    inputs, targets, doc_ids = NextToken(data, RowFormat(12, EOS, document_mask=True)).batch(np.arange(50))
    plain = NextToken(data, RowFormat(12, EOS)).batch(np.arange(50))
    np.testing.assert_array_equal(inputs, plain[0])
    np.testing.assert_array_equal(targets, plain[1])
    np.testing.assert_array_equal(np.diff(doc_ids), inputs[:, 1:] == EOS)


def steps(
    n: int, world_size: int, state: dict[str, Any] | None = None
) -> tuple[list[NDArray[np.int64]], dict[str, Any]]:
    """Global batches (batch_rows, context + 1) of n steps, put together from all ranks, and the state after them."""
    reader = PreparedReader(rows(), seed=7)
    loaders = [TrainLoader(reader, 24, 24 // world_size // 2, r, world_size, state) for r in range(world_size)]
    batches = []
    for _ in range(n):
        items = [next(loader) for loader in loaders]
        batch = np.empty((24, CONTEXT + 1), np.int64)
        for rank, (micro_batches, _) in enumerate(items):
            inputs, targets = (np.concatenate(parts) for parts in zip(*micro_batches, strict=True))
            batch[rank::world_size] = np.concatenate([inputs, targets[:, -1:]], 1)
            assert all(part.flags.c_contiguous for micro in micro_batches for part in micro)
        batches.append(batch)
        state = json.loads(json.dumps(merged([position for _, position in items])))
    assert state is not None
    return batches, state


def test_batches_do_not_depend_on_ranks_or_restarts() -> None:
    expected, end = steps(20, world_size=1)
    assert end["rows"] == 480  # two epochs of 200 rows and some
    first, state = steps(7, world_size=4)
    second, state = steps(4, world_size=2, state=state)
    third, state = steps(9, world_size=3, state=state)
    assert state == end
    for got, want in zip(first + second + third, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    starts = (np.concatenate(expected)[:, -1] + 1) // CONTEXT - 1
    for epoch in (starts[:200], starts[200:400]):
        assert sorted(epoch.tolist()) == list(range(200))


def test_data_hash_tells_rows_and_their_order_apart() -> None:
    """Caught: a hash without the number of the row, or of the targets' last id."""
    numbers, (tokens_, targets) = np.arange(6), rows().batch(np.arange(6))
    reference = hash_of_rows(numbers, (tokens_, targets))
    assert reference == hash_of_rows(numbers[::-1], (tokens_[::-1], targets[::-1]))
    parts = [hash_of_rows(numbers[part], (tokens_[part], targets[part])) for part in (slice(2), slice(2, 6))]
    assert data_hash(parts) == data_hash([reference])
    changed = targets.copy()
    changed[3, -1] += 1
    others = [hash_of_rows(numbers, (tokens_, changed)), hash_of_rows(numbers, (tokens_[::-1], targets[::-1]))]
    assert len({reference % 2**64, *(other % 2**64 for other in others)}) == 3
