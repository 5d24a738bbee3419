"""Masked rows: shares, independence, the same on all ranks and after a resume, never the same twice; and their loss."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.core.constants import IGNORED
from ngpt_train.core.errors import ConfigError
from ngpt_train.data import Dataset, TrainLoader, merged, reader_of
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.masks import Masks, begins_word
from ngpt_train.data.rows import Batch, held_out_rows
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.models import Decoder, build_model
from tests.processes.runs import arguments, records, write_corpus

V, EOS, T = 50, 7, 40
MASKS = Masks(0.15, 0.1, 0.1, mask_id=V, eos=EOS, begins_word=None)


def rows(n: int, seed: int = 0) -> Batch:
    ids = np.random.default_rng(seed).integers(0, V, (n, T + 1))
    return ids[:, :-1], ids[:, 1:]


def test_shares_and_independence() -> None:
    """Each bound is five standard deviations. Caught: a share of the batch instead of the row, a fixed rounding, an
    action that depends on the place or the token, a random token that is eos or the mask."""
    tokens, targets = rows(10_000)
    read, chosen_ids = MASKS.of((tokens, targets), np.arange(10_000), seed=3)
    chosen = chosen_ids != IGNORED
    np.testing.assert_array_equal(chosen_ids[chosen], tokens[chosen])
    np.testing.assert_array_equal(read[~chosen], tokens[~chosen])
    assert set(chosen.sum(1)) == {6}  # 0.15 * 40, whatever is drawn
    n = chosen.sum()
    assert np.abs(chosen.mean(0) - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / 10_000)
    hidden, same = read[chosen] == V, read[chosen] == tokens[chosen]
    for share, found in ((0.8, hidden), (0.1 + 0.1 / (V - 1), same)):
        assert abs(found.mean() - share) < 5 * np.sqrt(share * (1 - share) / n)
    others = read[chosen][~hidden & ~same]
    counts = np.bincount(others, minlength=V + 1)
    assert counts[EOS] == counts[V] == 0
    assert np.abs(counts[:V].sum() / (V - 1) - np.delete(counts[:V], EOS)).max() < 5 * np.sqrt(len(others) / V)
    # Pairs: neighbours in a row, and a place in two rows that follow one another.
    both = 6 / 40 * 5 / 39
    assert abs((chosen[:, 1:] & chosen[:, :-1]).mean() - both) < 5 * np.sqrt(both / n)
    assert abs((chosen[1:] & chosen[:-1]).mean() - 0.15**2) < 5 * 0.15 / np.sqrt(n)


def test_rounding_padding_and_rows_before() -> None:
    """Of 9 tokens one or two are chosen, in the mean 1.35; none without a target there."""
    tokens, targets = rows(20_000)
    targets = np.where((np.arange(T) >= 5) & (np.arange(T) < 14), targets, IGNORED)
    _, chosen_ids, doc_ids = MASKS.of((tokens, targets, tokens * 0), np.arange(20_000), seed=3)
    chosen = chosen_ids != IGNORED
    assert set(chosen.sum(1)) == {1, 2}
    assert abs(chosen.sum(1).mean() - 1.35) < 5 * np.sqrt(0.35 * 0.65 / 20_000)
    assert not chosen[targets == IGNORED].any()
    assert not doc_ids.any()


def test_a_mask_is_a_function_of_seed_and_number() -> None:
    """Caught: masks by place in the batch, by epoch alone, or of validation that follow the run's seed."""
    batch = rows(64)
    numbers = np.arange(100, 164)
    read, _ = MASKS.of(batch, numbers, seed=3)
    part = slice(10, 50, 3)
    alone, _ = MASKS.of((batch[0][part], batch[1][part]), numbers[part], seed=3)
    np.testing.assert_array_equal(alone, read[part])
    for numbers_, seed in ((numbers + 64, 3), (numbers, 4)):
        other, _ = MASKS.of(batch, numbers_, seed)
        assert (other != read).any(1).all()

    config = load_config(["model=gpt", "objective=masked", "scale=debug", "tokenizer=bytes", "model.context=8"])
    ids = np.random.default_rng(0).integers(0, 256, 800).astype(np.uint16)
    text = Tokens("train", Path("tokens"), [ids], eos=256)
    tokenizer = load_tokenizer(config.tokenizer)
    data = Dataset(text, text, tokenizer, "", Path(), {})

    def steps(world_size: int, first: dict[str, object] | None = None) -> tuple[list[Batch], dict[str, object]]:
        """The next three steps of 12 rows, and the position after them."""
        found: list[list[np.ndarray]] = [[] for _ in range(3)]
        positions = []
        for rank in range(world_size):
            reader = reader_of(data, config, rank, world_size, first)
            loader = TrainLoader(reader, 12, 12 // world_size, rank, world_size, first)
            for step in range(3):
                batches, position = next(loader)
                found[step] += [np.stack(batches[0], 1)]
            positions.append(position)
        in_order = [np.stack(parts, 1).reshape(12, 2, 8) for parts in found]
        return [tuple(step.swapaxes(0, 1)) for step in in_order], merged(positions)

    alone, position = steps(1)
    on_three, same_position = steps(3)
    assert position == same_position
    np.testing.assert_array_equal(on_three, alone)
    after, end = steps(1, position)
    np.testing.assert_array_equal(steps(2, position)[0], after)
    assert end != position

    held_out = held_out_rows(text, tokenizer, config).batch(np.arange(20))
    again = held_out_rows(text, tokenizer, replace(config, run=replace(config.run, seed=9))).batch(np.arange(5, 20))
    np.testing.assert_array_equal(again, [part[5:] for part in held_out])


def test_whole_words() -> None:
    """Every word is chosen as a whole or not at all, and never more tokens than wanted."""
    tokenizer = load_tokenizer(load_config(["tokenizer=bytes"]).tokenizer)
    begins = begins_word(tokenizer)
    assert set(np.flatnonzero(begins)) >= {ord(" "), ord("\n"), tokenizer.eos}
    assert not begins[ord("a")]
    text = " to be or not to be that is the question whether tis nobler in the mind to suffer the slings"
    ids = tokenizer.encode(text).astype(np.int64)
    tokens, targets = np.tile(ids[:-1], (500, 1)), np.tile(ids[1:], (500, 1))
    masks = replace(MASKS, mask_id=257, eos=256, begins_word=begins, keep=0.0, random=0.0)
    read, _ = masks.of((tokens, targets), np.arange(500), seed=0)
    words = np.cumsum(begins[tokens[0]])
    hidden = read == 257
    for word in range(1, words.max() + 1):
        of_word = hidden[:, words == word]
        assert (of_word.all(1) | ~of_word.any(1)).all()
    assert 0.12 < hidden.mean() <= 0.15 + 1 / len(words)
    # A document begins with a word, though bytes have no space there.
    two = np.tile(np.append(tokenizer.eos, tokenizer.encode("To be")).astype(np.int64), (500, 1))
    read, _ = replace(masks, share=0.4).of((two, two), np.arange(500), seed=0)
    assert 0 < (read[:, 0] == 257).sum() < 500
    assert ((read[:, 0] == 257) != (read[:, 1] == 257)).any()
    np.testing.assert_array_equal(read[:, 1] == 257, read[:, 2] == 257)


@pytest.mark.parametrize("name", ["gpt", "ngpt", "normformer", "angpt", "powernorm", "composed"])
def test_the_loss_of_chosen_tokens(name: str) -> None:
    """The loss, its gradients and the hits are those of all logits at the chosen places, and every place reads the
    whole document. Caught: logits of other places, a causal mask, attention across documents."""
    options = ["model.psi_warmup_steps=0"] if name == "powernorm" else []
    config = load_config(
        [f"model={name}", "objective=masked", "scale=debug", f"model.vocab_size={V + 1}", "model.context=40", *options]
    )
    model: Decoder = build_model(config.model).double()
    read, chosen = (torch.from_numpy(part) for part in MASKS.of(rows(4), np.arange(4), seed=0))
    doc_ids = (torch.arange(T) >= 25).long().expand(4, -1)
    model.eval()
    logits = model(read, doc_ids=doc_ids)
    expected = F.cross_entropy(logits.flatten(0, 1), chosen.flatten(), reduction="sum", ignore_index=IGNORED)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    total, n_tokens = model.loss(read, chosen, doc_ids)
    total.backward()
    assert n_tokens == 24
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for parameter, gradient in zip((p for p in model.parameters() if p.grad is not None), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        loss = model(read, chosen, doc_ids)
        losses = F.cross_entropy(logits.mT, chosen, reduction="none", ignore_index=IGNORED)
        torch.testing.assert_close(loss.by_token, losses)
        assert loss.n_hits.tolist() == ((logits.argmax(-1) == chosen).sum(1)).tolist()
        other = read.clone()
        other[:, 30] = (other[:, 30] + 1) % V
        changed = (model(other, doc_ids=doc_ids) != logits).any(-1)
    assert changed[:, 25:].all()
    assert not changed[:, :25].any()


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns, resumes, is evaluated to the same numbers, and continues no text."""
    text = write_corpus(tmp_path / "text.txt")
    run = arguments(tmp_path, text, "model=gpt", "objective=masked", "train.steps=30", "eval.every=15", "run.name=m")
    assert main(["train", *run, "train.stop_at=15"]) == main(["train", *run]) == 0
    last = records(tmp_path / "runs" / "m", "eval")[30]
    assert 0 < last["accuracy"] < 1
    out = tmp_path / "found.json"
    assert main(["evaluate", f"evaluate.checkpoint={tmp_path}/runs/m", f"evaluate.out={out}"]) == 0
    assert f'"accuracy": {last["accuracy"]}' in out.read_text()
    assert main(["generate", f"generate.checkpoint={tmp_path}/runs/m"]) == 2
    assert "fills in masks, and continues no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model=ntransformer", "objective=masked"], r"model\.bidirectional"),
        (["data.mask_keep=0.2"], r"data\.mask_keep"),
        (["objective=masked", "data.mask_keep=0.6", "data.mask_random=0.6"], "at most 1 together"),
        (["objective=masked", "data.pack=best_fit"], r"data\.document_mask=true"),
        (["objective=masked", "logging.sample_prompt=Once"], r"logging\.sample_prompt"),
        (["model.mask_share=0.3"], r"model\.mask_share"),
    ],
)
def test_refusals(options: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(options)
