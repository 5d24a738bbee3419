"""Benchmarks compare what they say they compare."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import attention, checkpoint, communication, data, roofline, start, step
from benchmarks.common import Entry, Run, interleaved, main
from ngpt_train.config import ConfigError, load_config
from ngpt_train.data import TrainLoader, open_dataset, reader_of, tokenizers
from ngpt_train.models import build_model
from tests.processes.runs import write_parquet_shards


def test_ratios_are_of_the_same_round() -> None:
    """On a machine that becomes slower. Caught: one run after the other, a ratio upside down, seconds for a rate."""
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return 10

    def measure(run: Run) -> tuple[float, float]:
        units = run()
        return {"a": 0.01, "b": 0.03}[order[-1]] * order.count("a"), units

    a, b = interleaved({"a": lambda: run("a"), "b": lambda: run("b")}, "a", 3, "things", measure, "of: ")
    assert order == ["a", "b"] * 4
    assert (a.name, a.ratio, a.relative_to, a.unit) == ("of: a", 1, "of: a", "things/s")
    assert (b.ratio, *b.spread) == pytest.approx((3, 3, 3))
    assert b.median_ms == pytest.approx(90)  # of the third of four rounds: the first does not count
    assert b.rate == pytest.approx(10 / 0.09)


def test_what_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that is not known is taken for an override; what was measured before an error is lost."""

    def bench(overrides: list[str]) -> list[Entry]:
        yield Entry(overrides[0], 2.0, (0.4, 0.6), 0.5, "other", 3e6, "tokens/s", {"error": 1e-3, "mfu": None})
        raise ConfigError("model=x: no")

    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "model=gpt", "--out", str(out)])
    assert main("doc", bench) == 2
    said = capsys.readouterr()
    assert "model=gpt" in said.out
    assert "0.50       0.4 to 0.6          2 ms  3 Mtokens/s, error 1.0e-03" in said.out
    assert said.err == "error: model=x: no\n"
    (entry,) = json.loads(out.read_text())["entries"]
    assert (entry["name"], entry["error"], entry["mfu"]) == ("model=gpt", 1e-3, None)
    monkeypatch.setattr(sys, "argv", ["x", "--output", "a"])
    with pytest.raises(SystemExit):
        main("doc", bench)


@pytest.mark.slow
def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side is left out, or files are left behind."""
    for name, value in (("TOKENS", 20_000), ("PREPARED_TOKENS", 20_000), ("ROUNDS", 1)):
        monkeypatch.setattr(data, name, value)
    # A dozen times the data are opened, and each time GPT-2's vocabulary would be parsed.
    for name in ("gpt2_ranks", "parse_ranks"):
        monkeypatch.setattr(tokenizers, name, functools.cache(getattr(tokenizers, name)))
    text = write_parquet_shards(tmp_path / "text", (900, 1500))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(data.tempfile, "tempdir", str(tmp_path / "tmp"))
    given = [f"data.path={text}", "data=local", "tokenizer=bytes", "model.context=64"]
    entries = {entry.name: entry for entry in data.bench(given)}
    for name, beside in (
        ("streaming, bytes", "datasets, bytes"),
        ("streaming, gpt2", "datasets, gpt2"),
        ("prepared shards", "nanoGPT's reader"),
        ("streamed: first batch after a resume", "prepared: first batch"),
    ):
        assert entries[name].relative_to == beside
    assert entries["streaming, tenths of an epoch, bytes"].more["memory_mb"][1] > 0
    assert not list((tmp_path / "tmp").iterdir()), "left behind"


def test_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPT and the config's model, which train on the same batch size. Caught: two runs of one architecture."""
    monkeypatch.setattr(step, "ROUNDS", 2)
    size = ["scale=debug", "model.context=16", "train.batch_rows=4", "train.device=cpu", "model.vocab_size=64"]
    for given, name in (([], "ngpt"), (["model=normformer"], "normformer")):
        first, second = step.bench([*size, *given])
        assert (first.name, first.ratio, second.name, second.relative_to) == ("gpt", 1, name, "gpt")
        assert second.spread[0] <= second.ratio <= second.spread[1]
        assert second.rate == pytest.approx(64 / second.median_ms * 1e3)
        assert first.more["activations_mb"] != second.more["activations_mb"] > 0
        assert first.more["mfu"] is None, "the peak of a CPU is guessed"


def test_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are not in the state, so that it is a third of what a run saves."""
    monkeypatch.setattr(checkpoint, "ROUNDS", 1)
    given = ["scale=debug", "model.vocab_size=512", "train.device=cpu"]
    entries = {entry.name: entry for entry in checkpoint.bench(given)}
    for what, beside in (("save", "torch.save"), ("load", "torch.load")):
        ours = entries[f"checkpoint, {what}: ours"]
        assert ours.relative_to == f"checkpoint, {what}: {beside}"
        assert ours.rate is not None
        size = ours.rate * ours.median_ms / 1e3
        assert size == pytest.approx(3 * 4 * build_model(load_config(given).model, 0).n_params(), rel=0.01)
    assert entries["checkpoint, stall: beside training"].relative_to == "checkpoint, stall: a step"


def test_attention(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An implementation that is not here ends the benchmark, or passes for one that is; FLOPs of whole rows are counted
    for documents, whose kernels then look faster than they are."""
    there = attention.implementations

    def with_documents(doc_ids: torch.Tensor) -> dict[str, attention.Implementation]:
        found = there(doc_ids)
        return found | {"documents, pretended": found[attention.PICKED]}

    monkeypatch.setattr(attention, "implementations", with_documents)
    monkeypatch.setattr(attention, "DOCUMENTS_PER_TOKEN", 1 / 16)
    monkeypatch.setattr(attention, "ROUNDS", 1)
    entries = {entry.name: entry for entry in attention.bench("64", "cpu")}
    assert "cudnn does not run here" in capsys.readouterr().out
    assert not [name for name in entries if "cudnn" in name]
    B, H, D = attention.SHAPES["cpu"]
    lengths = attention.lengths(attention.documents(B, 64, torch.device("cpu")))
    for label, factor in (("forward", 1), ("forward and backward", 3.5)):
        for way, squares in (("math", B * 64**2), ("documents, pretended", sum(n**2 for n in lengths))):
            entry = entries[f"attention, 64 tokens, {label}: {way}"]
            assert entry.relative_to == f"attention, 64 tokens, {label}: as torch picks"
            assert entry.more["document_tokens"] == (B * 64 / len(lengths) if "documents" in way else 64)
            assert entry.rate is not None
            assert entry.rate * entry.median_ms == pytest.approx(1e3 * factor * 2 * H * D * squares)


def test_one_rank_exchanges_nothing() -> None:
    """`tests/processes/test_communication.py` counts the calls of several."""
    with pytest.raises(ConfigError, match="one rank tells nobody anything"):
        next(communication.bench(["scale=debug", "train.device=cpu"]))


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


def test_the_products_of_a_step_are_replayed() -> None:
    """Caught: a product that is missed or counted twice, of a block, of the loss or of either gradient."""
    config = load_config(["model=gpt", "scale=debug", "model.vocab_size=1000", "train.device=cpu"], world_size=1)
    state = step.build_state(config)
    run = step.steps_of(state)
    tokens = run()
    events = roofline.events_of(roofline.profile_of(run))
    calls = [roofline.Call(event) for event in events if roofline.is_replayed(event.name)]
    multiplied = 0
    for call in calls:
        call()
        if "attention" not in str(call.operator):
            n_k, k_m = [x for x in call.positional if isinstance(x, torch.Tensor)][-2:]
            multiplied += n_k.numel() * k_m.shape[-1]
    embedding = state.model.get_parameter("embedding")  # it is looked up, not multiplied
    matrices = sum(p.numel() for p in state.model.parameters() if p.ndim == 2 and p is not embedding)
    assert multiplied == 3 * matrices * tokens
    assert sum("attention" in str(call.operator) for call in calls) == 2 * config.model.n_layers


def test_imports_by_package() -> None:
    """Caught: the time of what a module imports counted twice, all of torch as one, the headline as a module."""
    log = """import time: self [us] | cumulative | imported package
import time:       100 |        100 |   torch._C._x
import time:       300 |        400 | torch._C
warning: no line of the profile
import time:       500 |        900 | numpy
import time:       100 |        100 | torch.nn"""
    found = [(part.name, part.ms, part.of_all, part.calls) for part in start.packages(log)]
    assert found == [("numpy", 0.5, 0.5, 1), ("torch._C", 0.4, 0.4, 2), ("torch.nn", 0.1, 0.1, 1)]
