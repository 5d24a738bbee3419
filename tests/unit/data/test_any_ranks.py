"""Any number of ranks reads the streams: the same rows, the same cursors, also where several ranks read one stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngpt_train.data import TrainLoader, open_dataset, reader_of
from ngpt_train.data.loader import Share, latest
from ngpt_train.data.mixed import Mixture, Turns
from ngpt_train.data.streamed_text import Cursor, Stream, StreamedText, Windows
from tests.processes.runs import write_parquet_shards
from tests.unit.data.test_streams import SHARDS, consumed, streamed


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_parquet_shards(tmp_path / "text", SHARDS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("pack", "workers"), [("concat", 1), ("best_fit", 0)])
def test_ranks_that_do_not_divide_the_streams(text: Path, pack: str, workers: int) -> None:
    """Caught: a rank that skips too little or too much after a resume; the cursor of a rank that is behind, or the
    largest of each number on its own; cursors of rows that were made but not taken; a seed that knows the rank."""
    config = streamed(text, f"data.pack={pack}")
    expected, end, _ = consumed(config, [(12, 1, 0)], batch_rows=80)
    parts = [(2, 5, 0), (1, 80, 0), (1, 1, 2 * workers), (2, 8, 0), (1, 2, 0), (1, 4, 0), (2, 16, 0), (2, 5, workers)]
    found, state, _ = consumed(config, parts, ahead=2, batch_rows=80)
    np.testing.assert_array_equal(found, expected)
    assert state == end
    assert len({row.tobytes() for row in expected}) > 250  # of several epochs
    other, _, _ = consumed(replace(config, run=replace(config.run, seed=1)), [(1, 1, 0)], batch_rows=80)
    assert not np.array_equal(other, expected[:80])


@pytest.mark.parametrize("world_size", [1, 3, 5, 8, 16])
def test_workers_make_the_rows_of_a_mixture_that_their_rank_takes(world_size: int) -> None:
    """Every row of every source once, in the order of each rank."""
    mixture = Mixture(("web", "old"), (0.7, 0.3), seed=3)
    taken = np.array([[5, 4, 3, 3], [0, 1, 1, 1]])  # of 4 streams, in the first 18 rows
    expected = Counter[tuple[int, int]]()
    counted = taken.copy()
    for row, source in enumerate(mixture.sources(np.arange(18, 18 + 4000)), 18):
        expected[int(source), int(counted[source, row % 4]) * 4 + row % 4] += 1
        counted[source, row % 4] += 1
    found = Counter[tuple[int, int]]()
    for rank in range(world_size):
        share = Share(rank, world_size)
        own = mixture.sources(np.arange(share.next_row(18, world_size), 18 + 4000, world_size))
        for source in (0, 1):
            numbers = list(islice(Turns(mixture, share, 18, taken, source), int((own == source).sum())))
            found.update((source, number) for number in numbers)
    assert found == expected
    assert set(found.values()) == {1}


@pytest.mark.parametrize(("world_size", "together"), [(1, 1), (96, 1), (128, 2), (5, 5), (256, 4), (4096, 64)])
def test_what_shared_streams_cost(world_size: int, together: int) -> None:
    """`together` ranks read a stream, so a rank makes that many rows for each row that it takes (docs/data.md)."""
    shares = [Share(rank, world_size) for rank in range(world_size)]
    readers = np.bincount([stream for share in shares for stream in share.streams(192)], minlength=192)
    assert set(readers.tolist()) == {together}
    for share in shares[:: max(1, world_size // 7)]:
        rows = range(share.next_row(1000, world_size), 1000 + 8 * world_size, world_size)
        assert {row % 192 for row in rows} <= set(share.streams(192))


def test_a_rank_that_shares_a_stream_makes_all_its_rows(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = streamed(text)
    data = open_dataset(config)
    assert isinstance(data.train, StreamedText)
    made = 0
    rows = Stream.rows

    def counted(self: Stream, cursor: Any) -> Any:
        nonlocal made
        for row in rows(self, cursor):
            made += 1
            yield row

    monkeypatch.setattr(Stream, "rows", counted)
    for rank in (0, 6):
        made = 0
        loader = TrainLoader(reader_of(data, config, rank, 8), 24, 1, rank, 8)
        for _ in range(10):
            next(loader)
        assert 30 <= made <= 2 * 30
    assert made > 50


def test_the_furthest_cursor_is_the_later_one() -> None:
    """Caught: the largest of each number, which is a place where no rank has been."""
    ranks = [
        np.array([[0, 1, 9, 9, 9], [2, 0, 0, 0, 1], [-1] * 5]),
        np.array([[1, 0, 0, 0, 3], [2, 0, 0, 0, 0], [0] * 5]),
    ]
    assert latest(ranks).tolist() == [[1, 0, 0, 0, 3], [2, 0, 0, 0, 1], [0] * 5]
    assert latest(ranks[::-1]).tolist() == latest(ranks).tolist()


def test_first_rows_are_fetched_before_they_are_asked_for(tmp_path: Path) -> None:
    """So that no collective of the first step waits for a download. Caught: shards fetched with the first batch."""
    config = streamed(write_parquet_shards(tmp_path / "text", (60,) * 8), streams=4)
    data = open_dataset(config)

    def fetched() -> set[Path]:
        return set((tmp_path / "cache/documents").glob("*/header.json"))

    before = fetched()
    assert len(before) <= config.data.open_shards, "the validation split reads no more"
    reader = reader_of(data, config, rank=1, world_size=2)
    after = fetched()
    assert len(before) < len(after) <= 2 * config.data.open_shards
    assert isinstance(data.train, StreamedText)
    opened = data.train.open()
    opened.soon = lambda shards: None  # type: ignore[method-assign]
    next(Stream(Windows(opened, data.train.settings), data.tokenizer, 1).rows(Cursor()))
    assert fetched() == after
    reader.close()
