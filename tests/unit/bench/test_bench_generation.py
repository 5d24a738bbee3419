"""`bench generation`."""

import pytest
import torch

from ngpt_train.bench import generation
from ngpt_train.bench.generation import LAST, bench, kept
from ngpt_train.core.errors import ConfigError
from ngpt_train.models import build_model
from ngpt_train.models.decoding import Cached
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig

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


def test_bench_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' entry is left out, with a word, where the package is not installed."""
    monkeypatch.setattr(generation, "ROUNDS", 1)
    cpu, said = torch.device("cpu"), []
    monkeypatch.setattr(generation.importlib.util, "find_spec", lambda name: None)
    entries = list(bench(GPTConfig(**SMALL), cpu, torch.float32, (20, 40), said.append))
    assert [entry.name for entry in entries] == [
        f"gpt, {n} tokens: {x}" for n in (20, 40) for x in ("kept", "recomputed")
    ]
    assert all(entry.relative_to.endswith("kept") and entry.unit == "tokens/s" for entry in entries)
    assert said == ["transformers is not installed: ngpt-train[hf]"]
    with pytest.raises(ConfigError, match="bench generation times decoders"):
        next(bench(GPTEncoderDecoderConfig(**SMALL), cpu, torch.float32))
