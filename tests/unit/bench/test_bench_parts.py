"""`bench attention` and `bench checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ngpt_train.__main__ import main
from ngpt_train.bench import attention
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


def test_attention_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs of whole rows are counted for documents, whose kernels then look faster than they are; a package's kernel
    is told other documents, or is compared with a pass that it is not; 16 tokens are given for the documents' mean
    length, though every row begins one, too."""
    calls: list[list[int]] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        return attention.sdpa(q, k, v, scale, causal, None)

    def varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        calls.append([int(n) for n in boundaries.diff() if n])
        rows = [x.split(calls[-1]) for x in (q, k, v)]
        return torch.cat([dense(*(x[None] for x in one), scale, True)[0] for one in zip(*rows, strict=True)])

    pretended = attention.flash.Flash(2, dense, varlen)
    monkeypatch.setattr(attention.flash, "find", lambda *given: pretended)
    monkeypatch.setattr(attention, "DOCUMENTS_PER_TOKEN", 1 / 16)
    said: list[str] = []
    shape = B, H, T, D = 2, 3, 64, 8
    entries = {e.name: e for e in attention.bench(torch.device("cpu"), [shape], 2, said.append, compiled_until=0)}
    lengths = attention.lengths(attention.documents(B, T, torch.device("cpu")))
    assert sum(lengths) == B * T
    assert len(lengths) > B
    assert calls
    assert all(call == lengths for call in calls)
    for label, factor in (("forward", 1), ("forward and backward", 3.5)):
        row = f"attention, {T} tokens, {label}"
        for way, squares in (("flash-attn 2", B * T**2), ("documents, flash-attn 2", sum(n**2 for n in lengths))):
            entry = entries[f"{row}: {way}"]
            assert entry.relative_to == f"{row}: as torch picks"
            assert entry.document_tokens == (B * T / len(lengths) if "documents" in way else T)
            assert entry.rate * entry.median_ms == pytest.approx(1e3 * factor * 2 * H * D * squares)
    assert "attention, 64 tokens: documents, flex skipped (budget)" in said


def test_documents_are_of_a_thousand_tokens() -> None:
    lengths = attention.lengths(attention.documents(64, 8192, torch.device("cpu")))
    assert sum(lengths) == 64 * 8192
    assert 64 * 8192 / len(lengths) == pytest.approx(1024 * 8192 / (8192 + 1024), rel=0.1)  # the row's end ends one
