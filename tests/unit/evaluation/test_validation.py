"""The loss of each validation row: right, stored as the contract says, and enough to pair two runs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import NextToken, RowFormat
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.evaluation import validation
from ngpt_train.evaluation.validation import (
    Evaluations,
    RowFiles,
    RowLosses,
    Validation,
    hash_of,
    rows_within_budget,
    unigram_loss,
)
from ngpt_train.models import Decoder, build_model
from ngpt_train.models.ngpt.keys import NGPTConfig
from tests.unit.evaluation.large import ALONE

CONTEXT, V = 8, 11
TOKENIZER = cast(Tokenizer, SimpleNamespace(n_bytes=np.full(V, 2), vocab_size=V, eos=0))


def model() -> Decoder:
    return build_model(NGPTConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=V, context=CONTEXT)).double()


IDS = np.random.default_rng(0).integers(0, V, 200).astype(np.uint16)


def held_out() -> Tokens:
    return Tokens("validation", Path("tokens"), [IDS], eos=0)


def config(*options: str) -> Config:
    return load_config(
        ["model=ngpt", "scale=debug", f"model.context={CONTEXT}", "train.batch_rows=4", "eval.every=10", *options]
    )


def evaluations(*options: str) -> Evaluations:
    return Evaluations(held_out(), TOKENIZER, config(*options))


@torch.no_grad()
def test_rows_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's sum and count against the logits, at every context, in chunks of which the last is filled up. Caught:
    a loss of another row, a mean, rows of another order, the training context's positions, a filler that counts."""
    monkeypatch.setattr(validation, "CHUNK_TOKENS", 24)
    found = evaluations("eval.rows=1000", "eval.contexts=[4,16]").row_losses(model(), ALONE)
    opened = np.r_[0, IDS].astype(np.int64)
    for context in (4, 8, 16):
        rows = [opened[i : i + context + 1] for i in range(0, 200 - 200 % context, context)]
        counts = [context] * len(rows)
        if 200 % context:  # the last row begins earlier, and no target counts twice
            rows, counts = [*rows, opened[200 - context :]], [*counts, 200 % context]
        expected = []
        for row, n in zip(rows, counts, strict=True):
            log_p = model()(torch.from_numpy(row[None, :-1])).log_softmax(-1)[0]
            expected.append(-float(log_p.gather(1, torch.from_numpy(row[1:, None]))[-n:].sum()))
        assert found[context].n_targets.tolist() == counts
        np.testing.assert_allclose(found[context].loss_sum, expected, rtol=1e-12)


def test_metrics_are_those_of_the_rows(tmp_path: Path) -> None:
    """Stored losses equal the reported ones to the bit, and are read without pickle."""
    check = evaluations("eval.rows=20", "eval.contexts=[16]")
    losses = check.row_losses(model().float(), ALONE)
    metrics = check.metrics(losses)
    for context, suffix in ((8, ""), (16, "_ctx16")):
        path = tmp_path / f"{context}.npz"
        losses[context].write(path)
        stored = np.load(path)
        assert sorted(stored) == ["loss_sum", "n_targets", "rows_hash"]
        assert (stored["loss_sum"].dtype, stored["n_targets"].dtype) == (np.float64, np.int64)
        total, n = stored["loss_sum"].sum(), stored["n_targets"].sum()
        assert metrics[f"loss{suffix}"] == total / n
        assert metrics[f"ppl{suffix}"] == math.exp(total / n)
        assert metrics[f"bits_per_byte{suffix}"] == pytest.approx(total / n / math.log(2) / 2)
        assert (metrics[f"rows{suffix}"], metrics[f"n_targets{suffix}"]) == (len(stored["loss_sum"]), n)
        assert metrics[f"rows_hash{suffix}"] == str(stored["rows_hash"])
    assert len({name.partition("_ctx")[0] for name in metrics}) * 2 == len(metrics)


def test_the_hash_says_which_rows() -> None:
    """Caught: a hash that does not see the order, the targets, or how long the rows are."""
    ids = np.random.default_rng(0).integers(0, V, (4, 9))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    masked = targets.copy()
    masked[2, 3] = -100
    others = [
        (tokens, targets),
        (tokens[::-1], targets[::-1]),
        (tokens, masked),
        (tokens.reshape(2, 16), targets.reshape(2, 16)),
        (tokens[:3], targets[:3]),
    ]
    hashes = [hash_of(*other) for other in others]
    assert len(set(hashes)) == len(hashes)
    assert all(len(found) == 16 and int(found, 16) >= 0 for found in hashes)
    assert hashes[0] == hash_of(tokens.copy(), targets.astype(np.int32).astype(np.int64))


def test_the_rows_are_the_same_for_every_model_and_seed() -> None:
    """The rows depend on tokenizer and context, not on the architecture, its seed or its batch."""
    gpt = load_config(["model=gpt", "scale=debug", f"model.context={CONTEXT}", "run.seed=5", "eval.rows=20"])
    other = Evaluations(held_out(), TOKENIZER, gpt).at_training_context
    assert evaluations("eval.rows=20").at_training_context.rows_hash == other.rows_hash
    assert evaluations("eval.rows=19").at_training_context.rows_hash != other.rows_hash


def test_a_budget_leaves_rows_out_before_the_end() -> None:
    """A forward pass costs a third of a step: 10 % of 10 steps of 4 rows are 12 rows. Caught: other rows in each
    validation, fewer rows at the end, a budget for each context by itself."""
    check = evaluations("eval.rows=20", "eval.budget=0.1", "eval.contexts=[4]")
    early, whole = (check.row_losses(model(), ALONE, last) for last in (False, True))
    assert [len(early[8].loss_sum), len(early[4].loss_sum), len(whole[8].loss_sum)] == [6, 12, 20]
    assert set(early[8].loss_sum) <= set(whole[8].loss_sum)
    assert early[8].rows_hash == check.row_losses(model(), ALONE, last=False)[8].rows_hash != whole[8].rows_hash
    assert check.comparable_loss(whole) == pytest.approx(check.comparable_loss(early), rel=1e-12)
    assert check.comparable_loss(early) == early[8].metrics()["loss"] != whole[8].metrics()["loss"]
    assert [rows_within_budget(config(f"eval.budget={share}"), 1) for share in (0.1, 1e-9)] == [12, 1]
    without_every = config("eval.budget=0.1", "train.steps=30")
    without_every.eval.every = 0
    assert rows_within_budget(without_every, 1) == 36, "of the whole run"
    assert "before the last take 6 of these rows" in check.notes()[1]
    assert len(evaluations("eval.rows=20", "eval.budget=9").notes()) == 1


def test_masked_targets_that_are_asked_for() -> None:
    """Caught: tokens counted for targets, of which a masked row has a share; rows left over that are called none."""
    check = evaluations("objective=masked", "model.mask_share=0.25", "eval.tokens=40")
    assert check.at_training_context.n_rows == 160 // CONTEXT
    assert "all that is held out" not in check.notes()[0]


def test_fewer_targets_than_asked_for_are_said() -> None:
    assert "fewer than eval.tokens=1,000" in evaluations("eval.tokens=1000").notes()[0]
    assert "fewer" not in evaluations("eval.tokens=190").notes()[0]


def test_a_context_longer_than_the_split_is_refused() -> None:
    with pytest.raises(DataError, match=r"eval\.contexts.*200 tokens.*leave 256 out"):
        evaluations("eval.rows=4", "eval.contexts=[16,256]")


def losses(seed: int, n: int = 4096, shift: float = 0.0) -> RowLosses:
    """Rows of 1,024 targets whose losses differ by more than models do."""
    texts, noise = np.random.default_rng(0), np.random.default_rng(seed)
    per_token = 3 + 0.3 * texts.standard_normal(n) + 0.01 * noise.standard_normal(n) + shift
    return RowLosses(per_token * 1024, np.full(n, 1024), 4096 * n, "0123456789abcdef")


def test_a_thousandth_of_a_nat_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program of docs/records.md: a shift of 0.001 nats is four standard errors, while the standard errors of
    the two losses by themselves are five times the shift."""
    for run, found in {"gpt": losses(1), "ngpt": losses(2, shift=0.001)}.items():
        (tmp_path / f"runs/{run}/evals").mkdir(parents=True)
        found.write(tmp_path / f"runs/{run}/evals/step_00001000.npz")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs/records.md").read_text()
    paired: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], paired)
    difference, error, n = paired["difference"], paired["error"], paired["n"]
    assert difference == pytest.approx(0.001, abs=2 * error)
    assert difference > 3 * error
    assert error == pytest.approx(0.01 * math.sqrt(2 / len(n)), rel=0.05), "the noise of the two runs"
    assert (paired["a"]["loss_sum"] / n).std() / math.sqrt(len(n)) > 4 * difference


def test_files_are_those_of_the_records(tmp_path: Path) -> None:
    """Caught: files of steps that a resume has cut off, a repeated validation that overwrites the first one, files of
    others, as of an evaluate.out in this directory, that a resume deletes."""

    def recorded(*steps: int) -> RowFiles:
        """Of a run with eval records of these steps."""
        metrics = tmp_path / "metrics.jsonl"
        metrics.write_text("".join(json.dumps({"kind": "eval", "step": step}) + "\n" for step in steps))
        return RowFiles(tmp_path / "evals", metrics, context=CONTEXT)

    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "evals").iterdir())

    first = recorded()
    for step in (0, 5, 10):
        first.write(step, {8: losses(step, 3), 2048: losses(step, 3)})
    assert names()[:3] == ["step_00000000.npz", "step_00000000_context_2048.npz", "step_00000005.npz"]
    for name in (".step_00000005.npz.partial", ".step_00000010.npz.partial"):
        (tmp_path / "evals" / name).write_bytes(b"killed")
    others = ["averaged.json", "averaged.npz"]
    for name in others:
        (tmp_path / "evals" / name).write_bytes(b"somebody's")
    before = (tmp_path / "evals/step_00000005.npz").read_bytes()

    resumed = recorded(0, 5)
    assert [name for name in names() if "context" not in name] == [*others, "step_00000000.npz", "step_00000005.npz"]
    resumed.write(5, {8: losses(1, 3)})
    assert (tmp_path / "evals/step_00000005.npz").read_bytes() == before
    resumed.write(10, {8: losses(10, 3)})
    assert "step_00000010.npz" in names()
    recorded()
    assert names() == others


def test_equal_losses_are_equal_bytes(tmp_path: Path) -> None:
    """No time of writing is in the file, so that equal runs have equal files."""
    for name in ("a", "b"):
        losses(1).write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    replace(losses(1), rows_hash="f" * 16).write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_unigram_loss() -> None:
    def rows(ids: list[int]) -> NextToken:
        return NextToken(Tokens("validation", Path("tokens"), [np.array(ids, np.uint16)], eos=0), RowFormat(8, eos=0))

    held_out = Validation(rows([1, 2] * 8), np.ones(3), np.arange(2))
    expected = -(math.log(61 / 83) + math.log(21 / 83)) / 2
    assert unigram_loss(rows([1, 1, 1, 2] * 20), held_out, 3) == pytest.approx(expected)
