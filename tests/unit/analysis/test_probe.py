"""Where the loss is: classes of targets by brute force, sums that add up to the last bit, rows to read."""

import math
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from ngpt_train.analysis import probe_losses, token_classes
from ngpt_train.config import load_config
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import rows_of
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer, pieces_of

RANDOM = np.random.default_rng(0)
# As a model gives them: fp32, most of order 1, some so small that their last bits are far below the sum's.
LOSSES = (RANDOM.exponential(3, (40, 64)) * 10.0 ** -RANDOM.integers(0, 9, (40, 64))).astype(np.float32).astype(float)


def exact(values: np.ndarray) -> Fraction:
    return sum((Fraction(value) for value in values.ravel().tolist()), Fraction(0))


def test_sums_add_up_to_the_last_bit() -> None:
    """Caught: sums that differ with the order, so that classes do not add up; losses that are rounded visibly."""
    values = LOSSES.ravel().tolist()
    assert len({math.fsum(values[::-1][:k]) + math.fsum(values[::-1][k:]) for k in range(2000)}) > 1, "nothing to mend"
    found = probe_losses.addable(LOSSES)
    total = exact(found)
    assert Fraction(float(found.sum())) == total
    for seed in range(20):
        labels = np.random.default_rng(seed).integers(0, 9, LOSSES.shape)
        parts = np.bincount(labels.ravel(), found.ravel(), minlength=9)
        random.Random(seed).shuffle(shuffled := parts.tolist())
        assert sum(shuffled) == float(found.sum())
    assert abs(total - exact(LOSSES)) <= exact(LOSSES) * Fraction(1, 2**44)
    assert not probe_losses.addable(np.zeros((2, 3))).any()


def test_classes_of_frequency_and_position() -> None:
    """Caught: ranks from 0; ids that were never seen among the rarest; a position that is that of the input."""
    counts = np.array([5, 0, 9, 1, *[2] * 20])
    targets = np.array([[2, 0, 3, 1, 4, -100]])
    of = token_classes.of_frequency(targets, counts, "text")
    assert of.names == ["1 to 10", "11 to 24", "not in it"]
    assert [of.names[k] for k in of.labels[0][:5]] == ["1 to 10", "1 to 10", "11 to 24", "not in it", "1 to 10"]
    of = token_classes.of_position(np.zeros((2, 6), np.int64))
    assert [of.names[k] for k in of.labels[1]] == ["0", "1", "2 to 3", "2 to 3", "4 to 5", "4 to 5"]


class Words(BytesTokenizer):
    """Pieces as SentencePiece has them: a space before a word, which the beginning of a text does not show."""

    parts = (" the", "re", " 12", "!", " ", "\n", "", "a", " (", "\ufffd")

    def __init__(self) -> None:
        pass

    def encode(self, text: str) -> np.ndarray:
        return np.array([self.parts.index(text)])

    def decode(self, ids: object) -> str:
        return "".join(self.parts[i] for i in ids).removeprefix(" ")  # type: ignore[attr-defined]

    vocab_size = len(parts)


def test_types_are_of_the_text() -> None:
    """Caught: a space that decoding alone loses; a letter after a letter as a word start; digits as punctuation."""
    found = pieces_of(Words())
    assert found == list(Words.parts)
    ids = np.array([[0, 1, 3, 1, 2, 4, 5, 6, 8, 9, 0]])
    before = np.concatenate([[[6]], ids[:, :-1]], axis=1)
    types = [token_classes.TYPES[k] for k in token_classes.piece_types(ids, before, found, eos=6)[0]]
    assert types == [
        "word start",
        "word continuation",
        "punctuation",
        "word start",
        "digit",
        "whitespace",
        "whitespace",
        "end of document",
        "punctuation",
        "part of a character",
        "word start",
    ]


@pytest.mark.parametrize("packed", ["text", "best_fit"])
@pytest.mark.parametrize("ends", [True, False])
def test_sources_of_targets(packed: str, ends: bool) -> None:
    """Caught: the source of the row in place of the target's; rows that are packed otherwise than the text's; an eos
    that is of the next document's source."""
    more = ["data.pack=best_fit"] if packed == "best_fit" else []
    config = load_config(["scale=debug", "tokenizer=bytes", "model.context=16", "eval.rows=64", *more])
    generator = np.random.default_rng(1)
    texts = [
        [np.append(generator.integers(k * 50, k * 50 + 50, generator.integers(3, 30)), 256) for _ in range(12)]
        for k in range(3)
    ]
    if not ends:
        texts[-1][-1] = texts[-1][-1][:-1]
    shards = [np.concatenate(documents) for documents in texts]
    offsets = [np.cumsum([0, *map(len, documents)]) for documents in texts]
    validation = Tokens("validation", Path("x"), shards, 256, offsets)
    rows = rows_of(validation, config)
    chosen = np.arange(len(rows))[::2]
    _, targets, *_ = rows.batch(chosen)
    of = token_classes.of_source(validation, ["a", "b", "c"], config, chosen)
    counts = (targets != -100) & (targets != 256)  # eos is the same everywhere
    assert counts.sum() > 100
    assert (of.labels[counts] == targets[counts] // 50).all()
    assert ((of.labels != -100) == (targets != -100)).all()
    every = token_classes.of_source(validation, ["a", "b", "c"], config, np.arange(len(rows))).labels
    assert np.bincount(every[every != -100]).tolist() == [*map(len, shards)]


def test_rows_where_two_models_differ_most() -> None:
    """Caught: a row that is long before one that differs; rows by their sums; losses of the wrong target."""
    tokens = np.arange(24).reshape(3, 8) + 97
    targets = tokens + 1
    targets[1, 2:] = -100
    one = np.ones((3, 8))
    two = one.copy()
    two[0] += 0.1
    two[1, :2] += 0.3
    two[2, 5] -= 1.6
    two[1, 2:] = 50  # where no target counts
    letters = [chr(k) for k in range(257)]
    content = probe_losses.report(
        [{"name": "a"}, {"name": "b"}],
        {"a": one, "b": two},
        (tokens, targets),
        np.array([7, 8, 9]),
        [token_classes.of_position(targets)],
        letters,
        2,
        {},
    )
    assert [row["number"] for row in content["rows"]] == [8, 9]
    first, second = content["rows"]
    assert first["text"] == "jk"
    assert second["most"][0]["text"] == chr(targets[2, 5])
    assert second["most"][0]["loss"] == pytest.approx({"a": 1.0, "b": -0.6})
    assert content["models"][1]["targets"] == 18
    (of,) = content["classes"]
    for model in content["models"]:
        name = model["name"]
        assert sum(each["loss_sum"][name] for each in of["classes"]) == model["loss_sum"]
        assert sum(content["by_position"]["loss_sum"][name]) == model["loss_sum"]
        assert model["loss"] == model["loss_sum"] / 18
    only = probe_losses.standing_out([two], targets != -100, 1)
    assert only == [1]
