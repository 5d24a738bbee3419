"""Any number of ranks reads the streams: the same rows, the same cursors, also where several ranks read one stream."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.data import TrainLoader, merged, open_dataset, prepare_dataset, reader_of
from ngpt_train.data.mixed import Mixture, Turns
from ngpt_train.data.position import Share, latest
from ngpt_train.data.streamed.stream import Cursor, Stream, Windows
from ngpt_train.data.streamed.streamed_text import StreamedText
from tests.processes.runs import write_parquet_shards
from tests.unit.data.test_streams import SHARDS, streamed

BATCH_ROWS = 80  # 12 streams: of the ranks below only 1 and 2 divide them


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_parquet_shards(tmp_path / "text", SHARDS)


def consumed(
    config: Config, parts: list[tuple[int, int, int]], batch_rows: int = BATCH_ROWS
) -> tuple[NDArray[np.int64], dict[str, Any], dict[str, int]]:
    """Targets of all rows (rows, context), the state after them, and the rows of each source.

    parts: (steps, world size, workers), each resumed from the state of the one before.
    """
    state: dict[str, Any] | None = None
    rows = []
    for steps, world_size, workers in parts:
        run = replace(config, data=replace(config.data, workers=workers))
        data = open_dataset(run)
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(
                    closing(
                        TrainLoader(
                            reader_of(data, run, rank, world_size, state), batch_rows, 1, rank, world_size, state
                        )
                    )
                )
                for rank in range(world_size)
            ]
            for _ in range(steps):
                items = [next(loader) for loader in ranks]
                batch = np.empty((batch_rows, config.model.context), np.int64)
                for rank, (micro_batches, _) in enumerate(items):
                    batch[rank::world_size] = np.concatenate([micro[1] for micro in micro_batches])
                rows.append(batch)
            state = json.loads(json.dumps(merged([position for _, position in items])))
    assert state is not None
    by_source = [position.rows_by_source for _, position in items]
    return np.concatenate(rows), state, {name: sum(rank[name] for rank in by_source) for name in by_source[0]}


@pytest.mark.parametrize(("pack", "workers"), [("concat", 1), ("best_fit", 0)])
def test_ranks_that_do_not_divide_the_streams(text: Path, pack: str, workers: int) -> None:
    """Caught: a rank that skips too little or too much after a resume; the cursor of a rank that is behind, or the
    largest of each number on its own."""
    config = streamed(text, f"data.pack={pack}")
    expected, end, _ = consumed(config, [(11, 1, 0)])
    found, state, _ = consumed(
        config, [(2, 5, 0), (1, 80, 0), (1, 1, 0), (2, 8, 0), (1, 2, 0), (2, 16, 0), (2, 5, workers)]
    )
    np.testing.assert_array_equal(found, expected)
    assert state == end
    assert len({row.tobytes() for row in expected}) > 250


def test_mixtures_on_any_ranks(text: Path) -> None:
    """Caught: rows of a shared stream that are counted twice, or by the rank that takes them alone."""
    other = write_parquet_shards(text.parent / "other", (50, 50), seed=9)
    prepared = streamed(other)
    prepare_dataset(replace(prepared, data=replace(prepared.data, streaming=False)), text.parent / "prepared")
    mixture = f"web 6 local {text}; old 3 tokens {text.parent / 'prepared'}; new 1 local {other}"
    alone = streamed(text)
    config = replace(alone, data=replace(alone.data, kind="mixture", path=None, mixture=mixture))
    expected, end, by_source = consumed(config, [(8, 1, 0)])
    found, state, found_by_source = consumed(config, [(2, 5, 0), (1, 2, 0), (3, 16, 0), (2, 40, 0)])
    np.testing.assert_array_equal(found, expected)
    assert state == end
    assert found_by_source == by_source
    assert sum(by_source.values()) == 8 * BATCH_ROWS


@pytest.mark.parametrize("world_size", [1, 3, 5, 8, 16])
def test_workers_make_the_rows_of_a_mixture_that_their_rank_takes(world_size: int) -> None:
    """Every row of every source once, in the order in which a rank takes them."""
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


def test_the_default_on_128_ranks(tmp_path: Path) -> None:
    """192 streams, of which each rank reads three, with one other."""
    config = streamed(write_parquet_shards(tmp_path / "text", (2000, 1500)), streams=192)
    expected, end, _ = consumed(config, [(2, 1, 0)], batch_rows=256)
    found, state, _ = consumed(config, [(1, 128, 0), (1, 256, 0)], batch_rows=256)
    np.testing.assert_array_equal(found, expected)
    assert state == end


@pytest.mark.parametrize(("world_size", "together"), [(1, 1), (96, 1), (128, 2), (5, 5), (256, 4), (4096, 64)])
def test_what_shared_streams_cost(world_size: int, together: int) -> None:
    """The rows that a rank makes for each that it takes, as docs/data.md says."""
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
    reader = reader_of(data, config, rank=1, world_size=2)
    after = fetched()
    assert len(before) < len(after) <= 2 * config.data.open_shards
    assert isinstance(data.train, StreamedText)
    opened = data.train.open()
    opened.soon = lambda shards: None  # type: ignore[method-assign]
    next(Stream(Windows(opened, data.train.settings), data.tokenizer, 1).rows(Cursor()))
    assert fetched() == after
    reader.close()
