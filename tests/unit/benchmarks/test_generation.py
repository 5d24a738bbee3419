"""`benchmarks.generation`: the same tokens in every way."""

import pytest
import torch

from benchmarks import generation
from benchmarks.generation import LAST, kept
from ngpt_train.config import ConfigError
from ngpt_train.models import build_model
from ngpt_train.models.decoding import Cached
from ngpt_train.models.gpt.keys import GPTConfig

SMALL = {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 97, "context": 40}


def test_every_run_generates_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the model generates without kept keys. Caught: a run that goes on where the last one ended."""
    model, text = build_model(GPTConfig(**SMALL)), torch.arange(40)
    given: list[int] = []
    following = Cached.next

    def watched(self: Cached, tokens: dict[int, int]) -> torch.Tensor:
        given.extend(tokens.values())
        return following(self, tokens)

    monkeypatch.setattr(Cached, "next", watched)
    run = kept(model, text)
    assert run() == run() == LAST
    expected = text[:0]
    for _ in range(LAST):
        expected = torch.cat([expected, model.next_token_logits(text[:-LAST], expected).argmax()[None]])
    assert given == 2 * expected.tolist()


def test_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: another model in the place of the exported one; an entry that is left out without a word."""
    monkeypatch.setattr(generation, "ROUNDS", 1)
    monkeypatch.setattr(generation, "LENGTHS", (20,))
    size = ["scale=debug", "model.d_model=16", "model.n_heads=2", "model.vocab_size=97", "train.device=cpu"]
    there = generation.importlib.util.find_spec("transformers") is not None
    entries = list(generation.bench(["model=ngpt", *size]))
    assert [entry.name for entry in entries] == [
        f"ngpt, 20 tokens: {way}" for way in ("kept", "recomputed", *["transformers"] * there)
    ]
    assert all(entry.relative_to.endswith("kept") and entry.unit == "tokens/s" for entry in entries)
    with pytest.raises(ConfigError, match="only decoders are timed"):
        next(generation.bench(["model=gpt_encoder_decoder", *size]))
