"""Rows from several sources, in their shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngpt_train.config import load_config
from ngpt_train.config.schema import check
from ngpt_train.core.errors import ConfigError
from ngpt_train.data import open_dataset, prepare_dataset, tokenizers
from ngpt_train.data.mixed import Mixture
from tests.processes.runs import write_parquet_shards
from tests.unit.data.test_streams import SHARDS, STREAMS, consumed, streamed


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_parquet_shards(tmp_path / "text", SHARDS)


def test_mixture(text: Path) -> None:
    """Streamed text, prepared tokens and other streamed text, the same for any ranks and restarts.

    Caught: a hash that knows the rank; counts of rows that were made but not taken; sources that share their counts;
    rows of a shared stream that are counted twice, or by the rank that takes them alone.
    """
    other = write_parquet_shards(text.parent / "other", (50, 50), seed=9)
    alone = streamed(text)
    prepared = streamed(other)
    prepare_dataset(replace(prepared, data=replace(prepared.data, streaming=False)), text.parent / "prepared")
    mixture = f"web 6 local {text}; old 3 tokens {text.parent / 'prepared'}\nnew 1 local {other}"
    config = replace(alone, data=replace(alone.data, kind="mixture", path=None, mixture=mixture))
    expected, end, by_source = consumed(config, [(12, 1, 0)], batch_rows=80)
    parts = [(3, 5, 0), (2, 2, 1), (4, 1, 0), (1, 16, 0), (1, 4, 0), (1, 40, 0)]
    found, state, found_by_source = consumed(config, parts, ahead=2, batch_rows=80)
    np.testing.assert_array_equal(found, expected)
    assert state == end
    taken = {name: sum(sum(row) for row in state["cursors"][f"{name}/rows"]) for name in ("web", "old", "new")}
    assert taken == by_source == found_by_source
    assert sum(taken.values()) == 960
    assert taken["web"] == pytest.approx(0.6 * 960, rel=0.1)
    assert taken["new"] == pytest.approx(0.1 * 960, rel=0.3)
    # A source gives the rows that it gives alone, in the same order within a stream.
    numbers = np.arange(960)
    of_web = Mixture(("web", "old", "new"), (0.6, 0.3, 0.1), seed=0).sources(numbers) == 0
    rows_mixed = expected[of_web & (numbers % STREAMS == 5)]
    rows_alone = consumed(alone, [(12, 1, 0)], batch_rows=80)[0][5::STREAMS]
    np.testing.assert_array_equal(rows_mixed, rows_alone[: len(rows_mixed)])


def test_validation_has_the_shares_of_the_mixture(text: Path) -> None:
    """With eval.tokens. Caught: a source that gives all its held-out text, or rows instead of tokens."""
    other = write_parquet_shards(text.parent / "other", SHARDS, seed=9)
    alone = streamed(text)
    mixture = f"web 3 local {text}; other 1 local {other}"
    config = replace(alone, data=replace(alone.data, kind="mixture", path=None, mixture=mixture))
    config.eval.rows, config.eval.tokens = None, 400
    of_web, of_other = (len(ids) for ids in open_dataset(config).validation._shards)
    longest = 140  # ids of a document
    assert 300 <= of_web < 300 + longest
    assert 100 <= of_other < 100 + longest


def test_a_shard_that_one_source_skips_stays_in_the_others(text: Path) -> None:
    """Shards of the same name. Caught: names of skipped shards without their source."""
    other = write_parquet_shards(text.parent / "other", SHARDS, seed=9)
    damaged = other / "train-00002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    alone = streamed(text, "data.on_bad_shard=skip")
    mixture = f"web 1 local {text}; other 1 local {other}"
    config = replace(alone, data=replace(alone.data, kind="mixture", path=None, mixture=mixture))
    expected, end, _ = consumed(config, [(20, 1, 0)])
    assert list(end["skipped_shards"]) == ["other/train-00002.parquet"]
    found, state, _ = consumed(config, [(7, 2, 0), (13, 1, 0)])
    np.testing.assert_array_equal(found, expected)
    assert state == end


def test_a_tokenizer_of_all_sources(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared and streamed. Caught: a tokenizer trained on the first source alone; other shares than the rows';
    validation text in the sample; another tokenizer than the given one in a resume."""
    monkeypatch.setattr("ngpt_train.data.sources.source.SAMPLE_CHARACTERS", 40_000)
    letters = {"web": "abcd", "other": "wxyz"}
    for name, alphabet in letters.items():
        lines = [" ".join(alphabet[n % 4] * (1 + (n * k) % 7) for k in range(60)) for n in range(400)]
        (text.parent / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    paths = {name: text.parent / f"{name}.jsonl" for name in letters}
    mixture = f"web 3 local {paths['web']}; other 1 local {paths['other']}"
    drawn: list[str] = []
    train = tokenizers.train_sentencepiece
    monkeypatch.setattr(tokenizers, "train_sentencepiece", lambda c, n: train(drawn.extend(c) or drawn, n))  # type: ignore[func-returns-value]
    alone = streamed(text)
    for streaming in ("auto", True):
        drawn.clear()
        data = replace(alone.data, kind="mixture", path=None, mixture=mixture, streaming=streaming)
        tokenizer = replace(alone.tokenizer, kind="sentencepiece", vocab_size=310)
        config = replace(alone, data=data, tokenizer=tokenizer)
        check(config)
        found = open_dataset(config)
        sizes = [sum(len(piece) for piece in drawn if piece[0] in alphabet) for alphabet in letters.values()]
        assert 12_000 < sizes[0] <= 30_000, streaming
        assert 3_000 < sizes[1] <= 10_000, streaming
        held_out = found.tokenizer.decode(found.validation._shards[0][:40].tolist())
        assert not any(held_out in piece for piece in drawn)
        drawn.clear()
        assert open_dataset(config, found.tokenizer).fingerprint == found.fingerprint
        assert not drawn


@pytest.mark.parametrize(
    ("mixture", "says"),
    [
        ("web 1 local web/", "two sources or more"),
        ("web 1 local web/; web 2 local b/", "web is the name of two sources"),
        ("web 0 local web/; b 2 local b/", "a weight above 0 and up to 1e9 follows the name, not '0'"),
        ("web 1 files web/; b 2 local b/", "'files' is none of the kinds"),
        ("web 1 local; b 2 local b/", "local needs a file, directory or glob"),
        ("web 1 embedded here; b 2 local b/", "embedded reads no path"),
    ],
)
def test_mixtures_that_are_none(mixture: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.mixture") as raised:
        load_config(["data=mixture", f"data.mixture={mixture}"])
    assert says in str(raised.value)
