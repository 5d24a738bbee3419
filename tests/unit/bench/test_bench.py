"""Benchmarks compare what they say they compare."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from ngpt_train.__main__ import main
from ngpt_train.bench import data, step
from ngpt_train.bench.interleaved import interleaved
from ngpt_train.config import load_config
from ngpt_train.data import TrainLoader, open_dataset, reader_of
from tests.processes.runs import write_parquet_shards


def test_ratios_are_of_the_same_round() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> float:
        order.append(name)
        time.sleep(seconds)
        return 10

    entries = interleaved({"a": lambda: run("a", 0.01), "b": lambda: run("b", 0.03)}, "a", rounds=3, unit="things")
    assert order == ["a", "b"] * 4
    a, b = entries
    assert (a.ratio, a.relative_to, a.unit) == (1, "a", "things/s")
    assert b.ratio == pytest.approx(3, rel=0.3)
    assert b.spread[0] <= b.ratio <= b.spread[1]
    assert b.median_ms == pytest.approx(30, rel=0.3)
    assert b.rate == pytest.approx(10 / 0.03, rel=0.3)


def test_bench_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("TOKENS", 20_000), ("PREPARED_TOKENS", 20_000), ("ROUNDS", 2)):
        monkeypatch.setattr(data, name, value)
    text = write_parquet_shards(tmp_path / "text", (900, 1500))
    out = tmp_path / "result.json"
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(data.tempfile, "tempdir", str(tmp_path / "tmp"))
    given = [f"data.path={text}", "data=local", "tokenizer=bytes", "model.context=64", f"bench.out={out}"]
    assert main(["bench", "data", *given]) == 0
    printed = capsys.readouterr().out
    entries = {entry["name"]: entry for entry in json.loads(out.read_text())["entries"]}
    for name, beside in (
        ("streaming, bytes", "datasets, bytes"),
        ("streaming, gpt2", "datasets, gpt2"),
        ("prepared shards", "nanoGPT's reader"),
    ):
        assert name in printed
        assert entries[name]["relative_to"] == beside
        assert entries[name]["ratio"] > 0
        assert entries[name]["spread"][0] <= entries[name]["ratio"] <= entries[name]["spread"][1]
        assert entries[name]["median_ms"] > 0
    assert entries["streaming, tenths of an epoch, bytes"]["memory_mb"][1] > 0
    assert entries["streamed: first batch after a resume"]["relative_to"] == "prepared: first batch"
    assert all(entry["ratio"] > 0 and entry["relative_to"] for entry in entries.values())
    assert not list((tmp_path / "tmp").iterdir()), "left behind"


def test_bench_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of GPT and the config's model, which train on the same batch size. Caught: two runs of one architecture."""
    monkeypatch.setattr(step, "ROUNDS", 2)
    out = tmp_path / "result.json"
    size = ["scale=debug", "model.context=16", "train.batch_rows=4", "train.device=cpu", "model.vocab_size=64"]
    for given, name in (([], "ngpt"), (["model=normformer"], "normformer")):
        assert main(["bench", "step", *size, *given, f"bench.out={out}"]) == 0
        first, second = json.loads(out.read_text())["entries"]
        assert (first["name"], first["ratio"], second["name"], second["relative_to"]) == ("gpt", 1, name, "gpt")
        assert second["spread"][0] <= second["ratio"] <= second["spread"][1]
        assert second["rate"] == pytest.approx(64 / second["median_ms"] * 1e3)
        assert first["activations_mb"] != second["activations_mb"] > 0
        assert first["mfu"] is None, "the peak of a CPU is guessed"
    assert f"{'normformer':<44}" in capsys.readouterr().out


def test_both_sides_read_the_same_ids(tmp_path: Path) -> None:
    """What is beside ours makes rows of the same text with the same tokenizer: eos ends documents, nothing is lost."""
    text = write_parquet_shards(tmp_path / "text", (200,))
    config = load_config(
        [
            *("data=local", f"data.path={text}", "tokenizer=bytes", "model.context=64", "data.streaming=true"),
            *(f"data.cache={tmp_path / 'cache'}", "data.workers=0", "data.streams=1", "eval.rows=1"),
        ]
    )
    dataset = open_dataset(config)
    ours = TrainLoader(reader_of(dataset, config), 8, 8)
    theirs = data.datasets_batches(text, dataset.tokenizer, 64)
    counts = np.zeros((2, 257))
    last = None
    for _ in range(20):
        tokens, their_targets = next(theirs)
        assert last in (None, tokens[0, 0])
        np.testing.assert_array_equal(tokens[1:, 0], their_targets[:-1, -1])
        last = their_targets[-1, -1]
        for side, targets in enumerate((next(ours)[0][0][1], their_targets)):
            assert targets.shape == (8, 64)
            counts[side] += np.bincount(targets.ravel(), minlength=257)
    np.testing.assert_allclose(counts[0] / counts[0].sum(), counts[1] / counts[1].sum(), atol=0.02)
    assert counts[:, 256].min() > 0
