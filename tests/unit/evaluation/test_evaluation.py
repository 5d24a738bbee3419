"""Sampling and the validation set."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ngpt_train.config.sections.generation import GenerateConfig
from ngpt_train.data import Tokens
from ngpt_train.data.rows import NextToken, RowFormat
from ngpt_train.distributed.world import World
from ngpt_train.evaluation import validation
from ngpt_train.evaluation.sampling import sample
from ngpt_train.evaluation.validation import Validation, unigram_loss
from ngpt_train.models import Decoder, build_model
from ngpt_train.models.ngpt.keys import NGPTConfig
from tests.unit.evaluation.generated import generate

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def rows(ids: np.ndarray) -> NextToken:
    return NextToken(Tokens("validation", Path("tokens"), [ids.astype(np.uint16)], eos=0), RowFormat(8, eos=0))


def drawn(config: GenerateConfig, n: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(config.seed)
    counts = torch.bincount(torch.tensor([sample(LOGITS, config, generator) for _ in range(n)]), minlength=5)
    return counts / n


def test_temperature() -> None:
    assert torch.allclose(drawn(GenerateConfig(temperature=0.5)), torch.softmax(2 * LOGITS, 0), atol=0.03)
    assert drawn(GenerateConfig(temperature=0), 10)[1] == 1


def test_top_k() -> None:
    expected = torch.softmax(LOGITS[[1, 3]], 0)
    assert torch.allclose(drawn(GenerateConfig(temperature=1, top_k=2))[[1, 3]], expected, atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [1]), (0.65, [1, 3]), (0.89, [1, 2, 3]), (1.0, [0, 1, 2, 3, 4])])
def test_top_p(top_p: float, kept: list[int]) -> None:
    frequencies = drawn(GenerateConfig(temperature=1, top_p=top_p))
    assert frequencies.nonzero().flatten().tolist() == kept


def model() -> Decoder:
    return build_model(NGPTConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=11, context=8))


def test_generation_goes_beyond_the_context_and_stops_at_eos() -> None:
    prompt = torch.tensor([1, 2, 3])
    tokens = generate(model(), prompt, GenerateConfig(max_new_tokens=30, temperature=1), eos=-1, vocab_size=5)
    assert len(tokens) == 30
    assert tokens.max() < 5, "the model's vocabulary of 11 is padded"
    stopped = generate(
        model(), prompt, GenerateConfig(max_new_tokens=30, temperature=1), eos=int(tokens[4]), vocab_size=5
    )
    first = tokens.tolist().index(int(tokens[4]))
    assert stopped.tolist() == tokens[:first].tolist()


def test_validation_is_the_mean_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 3 rows for 7 rows: the last one is filled up, and what fills it does not count."""
    monkeypatch.setattr(validation, "CHUNK_TOKENS", 24)
    ids = np.random.default_rng(0).integers(0, 11, 56)
    check = Validation(rows(ids), np.full(11, 2), np.arange(7))
    assert check.chunk == 3
    result = check.row_losses(model(), World(0, 1, 0, torch.device("cpu"))).metrics()
    opened = np.r_[0, ids]
    whole = torch.from_numpy(np.stack([opened[i * 8 : i * 8 + 9] for i in range(7)]))
    loss_sum, n_tokens = model().loss(whole[:, :-1], whole[:, 1:])
    assert (n_tokens, result["rows"], result["n_targets"]) == (56, 7, 56)
    assert result["loss"] == pytest.approx(loss_sum.item() / 56, rel=1e-6)
    assert result["ppl"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2) / 2)


def test_unigram_loss() -> None:
    train, held_out = rows(np.array([1, 1, 1, 2] * 20)), rows(np.array([1, 2] * 8))
    check = Validation(held_out, np.ones(3), np.arange(2))
    counts = {1: 61 / 83, 2: 21 / 83}
    expected = -(math.log(counts[1]) + math.log(counts[2])) / 2
    assert unigram_loss(train, check, 3) == pytest.approx(expected)
