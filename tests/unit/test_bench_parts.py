"""`bench attention` and `bench checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.models import build_model


def test_bench_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An implementation that is not here ends the benchmark, or passes for one that is."""
    out = tmp_path / "attention.json"
    assert main(["bench", "attention", "train.device=cpu", f"bench.out={out}"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(out.read_text())["entries"]}
    assert "cudnn does not run here" in capsys.readouterr().out
    assert not [name for name in entries if "cudnn" in name]
    picked, by_math = (entries[f"attention, 256 tokens, forward: {who}"] for who in ("as torch picks", "math"))
    assert by_math["relative_to"] == picked["name"]
    assert by_math["rate"] == pytest.approx(1e3 * 2 * 2 * 6 * 256 * 256 * 64 / by_math["median_ms"])


def test_bench_checkpoint(tmp_path: Path) -> None:
    """Moments are not in the state, so that it is a third of what a run saves; files are left behind."""
    out = tmp_path / "checkpoint.json"
    given = ["scale=debug", "model.vocab_size=512", "train.device=cpu", f"bench.out={out}"]
    config = load_config(given)
    assert main(["bench", "checkpoint", *given]) == 0
    entries = {entry["name"]: entry for entry in json.loads(out.read_text())["entries"]}
    for what, beside in (("save", "torch.save"), ("load", "torch.load")):
        ours = entries[f"checkpoint, {what}: ours"]
        assert ours["relative_to"] == f"checkpoint, {what}: {beside}"
        size = ours["rate"] * ours["median_ms"] / 1e3
        assert size == pytest.approx(3 * 4 * build_model(config.model, 0).n_params(), rel=0.01)
