"""Streamed text: every id once an epoch. test_any_ranks.py: the same rows for any ranks, workers and restarts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data import TrainLoader, merged, open_dataset, reader_of
from ngpt_train.data.rows import RowFormat
from ngpt_train.data.sources.source import place_of
from ngpt_train.data.streamed_text import Cursor, Piece, Stream, StreamedText, StreamSettings, Windows
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer
from tests.processes.runs import write_parquet_shards

STREAMS, ROWS, CONTEXT, EOS = 12, 24, 31, 256
SHARDS = (40, 3, 25, 0, 61)  # documents


@pytest.fixture
def text(tmp_path: Path) -> Path:
    write_parquet_shards(tmp_path / "text", SHARDS)
    return tmp_path / "text"


def streamed(text: Path, *arguments: str, streams: int = STREAMS) -> Config:
    return load_config(
        [
            "scale=debug",
            "data=local",
            "data.streaming=true",
            f"data.path={text}",
            f"data.cache={text.parent / 'cache'}",
            "tokenizer=bytes",
            f"model.context={CONTEXT}",
            f"data.streams={streams}",
            "data.open_shards=2",
            "data.workers=0",
            "data.val_fraction=0.1",
            "eval.rows=2",
            f"train.batch_rows={ROWS}",
            *arguments,
        ]
    )


def consumed(
    config: Config, parts: Sequence[tuple[int, int, int]], ahead: int = 0, batch_rows: int = ROWS
) -> tuple[NDArray[np.int64], dict[str, Any], dict[str, int]]:
    """Tokens and targets of all rows, (rows, 2, context); the state after them; the rows of each source.

    parts: (steps, world size, workers), each resumed from the state of the part before. Every rank of that part went on
    for `ahead` more steps.
    """
    state: dict[str, Any] | None = None
    found = []
    for steps, world_size, workers in parts:
        run = replace(config, data=replace(config.data, workers=workers))
        data = open_dataset(run)
        with ExitStack() as stack:
            ranks = []
            for rank in range(world_size):
                reader = reader_of(data, run, rank, world_size, state)
                ranks.append(TrainLoader(reader, batch_rows, 1, rank, world_size, state))
                stack.callback(ranks[-1].close)
            for _ in range(steps):
                items = [next(loader) for loader in ranks]
                batch = np.empty((batch_rows, 2, CONTEXT), np.int64)
                for rank, (micro_batches, _) in enumerate(items):
                    batch[rank::world_size] = np.concatenate([np.stack(micro[:2], 1) for micro in micro_batches])
                found.append(batch)
            state = json.loads(json.dumps(merged([position for _, position in items])))
            for loader in ranks * ahead:
                next(loader)
    assert state is not None
    by_source = [position.rows_by_source for _, position in items]
    return np.concatenate(found), state, {name: sum(rank[name] for rank in by_source) for name in by_source[0]}


def epoch_of(text: StreamedText, stream: int) -> list[tuple[NDArray[np.integer], Cursor]]:
    """Rows of the stream's first epoch, and the first of the second."""
    rows = Stream(Windows(text.open(), text.settings), text.tokenizer, stream).rows(Cursor())
    found = [next(rows)]
    while found[-1][1].epoch == 0:
        found.append(next(rows))
    return found


def documents(text: Path, config: Config) -> Counter[bytes]:
    """The training documents, by a plain reading of the files."""
    import pyarrow.parquet as pq

    all_of_it = [str(row) for file in sorted(text.glob("*.parquet")) for row in pq.read_table(file)["text"].to_pylist()]
    return Counter(x.encode() for x in all_of_it if x and place_of(x.encode()) >= config.data.val_fraction)


def read(ids: Sequence[int]) -> list[bytes]:
    """The documents closed by eos."""
    found, current = [], bytearray()
    for i in ids:
        if i == EOS:
            found.append(bytes(current))
            current.clear()
        else:
            current.append(i)
    return found


def test_every_id_is_a_target_once_an_epoch(text: Path) -> None:
    """concat: the targets of a stream are its documents one after the other, with nothing lost at its end."""
    config = streamed(text)
    data = open_dataset(config).train
    assert isinstance(data, StreamedText)
    found: Counter[bytes] = Counter()
    for stream in range(STREAMS):
        rows = epoch_of(data, stream)
        for (row, _), (following, _) in pairwise(rows):
            assert row[-1] == following[0]  # a target, then an input
        assert rows[0][0][0] == EOS  # what opens the first document
        targets = np.concatenate([row[1:] for row, _ in rows])
        shards = data.open()
        n_documents = sum(
            shards.document(piece.shard, i) is not None
            for piece in pieces_of(data, stream)
            for i in range(piece.first, piece.last)
        )
        found.update(read(targets.tolist())[:n_documents])
    assert found == documents(text, config)


def pieces_of(data: StreamedText, stream: int) -> list[Piece]:
    pieces = []
    windows = Windows(data.open(), data.settings)
    for place, piece in Stream(windows, data.tokenizer, stream).pieces(Cursor()):
        if place.epoch:
            return pieces
        pieces.append(piece)
    raise AssertionError


def test_best_fit_cuts_no_document_that_fits(text: Path) -> None:
    config = streamed(text, "data.pack=best_fit")
    data = open_dataset(config)
    assert isinstance(data.train, StreamedText)
    whole = documents(text, config)
    found: Counter[bytes] = Counter()
    n_padding = n_ids = n_targets = 0
    for stream in range(STREAMS):
        for row, _ in epoch_of(data.train, stream):
            ids = row[row >= 0]
            n_padding, n_ids = n_padding + len(row) - len(ids), n_ids + len(ids)
            n_targets += len(ids) - 1
            found.update(read(ids[1:].tolist())[int(ids[0] != EOS) :])  # without the rest of a cut document
    fitting = {document: n for document, n in whole.items() if len(document) < CONTEXT}
    assert len(fitting) > 20
    assert {document: found[document] for document in fitting} == fitting
    assert n_targets == sum((len(document) + 1) * n for document, n in whole.items())
    assert n_padding / n_ids < 0.3  # of few documents for each stream
    form = reader_of(data, config)
    tokens, targets = form.take(np.arange(20 * ROWS))
    assert ((targets == -100) | (targets < 257)).all()
    assert (tokens >= 0).all()
    assert (targets == -100).any()


def test_orders_change_with_the_epoch() -> None:
    """Every document and shard once in each. Caught: epochs in one order; the last streams short of pieces in all."""
    settings = StreamSettings(STREAMS, 4, 3, RowFormat(CONTEXT, EOS))
    sizes = [(0, 0), (1, 5), (2, 1000)]
    orders = [settings.pieces(sizes, epoch, 0) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    for pieces in orders:
        covered = [(piece.shard, i) for piece in sorted(pieces) for i in range(piece.first, piece.last)]
        assert covered == [(shard, i) for shard, n in sizes for i in range(n)]
    piece = Piece(0, 3, 40)
    documents_ = [settings.document_order(piece, epoch) for epoch in range(2)]
    assert documents_[0] != documents_[1]
    assert sorted(documents_[0]) == sorted(documents_[1]) == list(range(3, 40))
    firsts = [[settings.first_place(stream, epoch, 0) for stream in range(STREAMS)] for epoch in range(3)]
    assert firsts[0] != firsts[1]
    assert [sorted(places) for places in firsts] == 3 * [list(range(STREAMS))]
    windows = [[settings.shards(10, epoch, window) for window in range(3)] for epoch in range(4)]
    assert len({str(epoch) for epoch in windows}) == 4
    for epoch in windows:
        assert [len(window) for window in epoch] == [4, 4, 2]
        assert sorted(x for window in epoch for x in window) == list(range(10))


def test_tokenizer_that_fails_names_the_document(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: BytesTokenizer, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        raise RuntimeError("too strange")

    data = open_dataset(streamed(text))
    monkeypatch.setattr(BytesTokenizer, "encode", fails)
    with pytest.raises(DataError, match=r"train-0000\d\.parquet, document \d+ .*bytes fails on it .*too strange"):
        reader_of(data, streamed(text)).take(np.arange(1))


def test_no_document_is_long_enough_to_continue(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a stream that looks for one for ever."""
    after = Windows.after

    def counted(self: Windows, epoch: int, window: int) -> tuple[int, int]:
        assert epoch < 10, "it looks on"
        return after(self, epoch, window)

    monkeypatch.setattr(Windows, "after", counted)
    config = streamed(text, "model=ntransformer", "model.source_context=4")
    data = open_dataset(config).train
    assert isinstance(data, StreamedText)
    settings = replace(data.settings, form=replace(data.settings.form, source_context=9_998))
    with pytest.raises(DataError, match=r"in 3 epochs there is no document of 10000 tokens"):
        next(Stream(Windows(data.open(), settings), data.tokenizer, 0).rows(Cursor()))


def test_validation_looks_further_where_the_first_shards_have_none(tmp_path: Path) -> None:
    write_parquet_shards(tmp_path / "text", (0, 1, 0, 60))
    validation = open_dataset(streamed(tmp_path / "text", streams=2)).validation
    assert len(validation) > CONTEXT


def test_validation_reads_as_many_shards_as_eval_tokens_take(tmp_path: Path) -> None:
    """And no more. Caught: the limit of data.open_shards, which would leave a validation with fewer targets than are
    held out; text for eval.contexts, which would change the rows of model.context."""
    text = write_parquet_shards(tmp_path / "text", (60, 60, 60, 60, 60, 60))

    def n_tokens(wanted: int, *contexts: int) -> int:
        config = streamed(text)
        config.eval.rows, config.eval.tokens, config.eval.contexts = None, wanted, list(contexts) or None
        return len(open_dataset(config).validation)

    whole = n_tokens(10**9)
    many = streamed(text)
    many.eval.rows = 100_000
    two_shards = len(open_dataset(many).validation)
    assert two_shards < whole / 2
    wanted = (two_shards + whole) // 2
    assert wanted <= n_tokens(wanted) < wanted + 300, "up to the end of a document"
    assert CONTEXT < n_tokens(1) == n_tokens(1, wanted) < wanted


def test_more_streams_than_documents(tmp_path: Path) -> None:
    write_parquet_shards(tmp_path / "text", (90,))
    config = streamed(tmp_path / "text", streams=4096)
    with pytest.raises(DataError, match=r"data\.streams=4096: in 3 epochs there is no document for stream"):
        consumed(config, [(200, 1, 0)])


def test_few_documents_are_said_to_repeat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the share of the rows, which is the share of equal documents. Caught: text that is read twice in silence."""
    (tmp_path / "text").mkdir()
    texts = ["".join(f"{i},{j} " for j in range(1000, 1250)) for i in range(10, 27)]
    held_out = sum(place_of(text.encode()) < 0.1 for text in texts)
    (tmp_path / "text/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = streamed(tmp_path / "text", "run.seed=2", streams=24)
    rows = reader_of(open_dataset(config), config).take(np.arange(len(texts[0]) * (17 - held_out) // CONTEXT))[1]
    repeated = 1 - len(np.unique(rows, axis=0)) / len(rows)
    assert 0.2 < repeated < 0.6
    [warning] = [record.getMessage() for record in caplog.records if "data.streams=24" in record.getMessage()]
    assert "share the text of 17 documents unevenly" in warning
    assert abs(int(re.findall(r"[Uu]p to (\d+) %", warning)[0]) / 100 - repeated) < 0.03
    fewer = int(re.findall(r"with data.streams=(\d+)", warning)[0])
    assert fewer < 24
    caplog.clear()
    config = replace(config, data=replace(config.data, streams=fewer))
    reader_of(open_dataset(config), config)
    assert "unevenly" not in caplog.text
