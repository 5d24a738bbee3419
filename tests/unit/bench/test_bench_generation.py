"""`bench generation`."""

import pytest
import torch

from ngpt_train.bench import generation
from ngpt_train.bench.generation import LAST, bench, kept
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import ConfigError
from ngpt_train.interop.exporting import in_transformers
from ngpt_train.models import build_model
from ngpt_train.models.decoding import Cached
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from ngpt_train.models.ngpt.keys import NGPTConfig
from ngpt_train.models.normformer.keys import NormFormerConfig

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
    entries = list(bench(GPTConfig(**SMALL), cpu, torch.float32, in_transformers, (20, 40), said.append))
    assert [entry.name for entry in entries] == [
        f"gpt, {n} tokens: {x}" for n in (20, 40) for x in ("kept", "recomputed")
    ]
    assert all(entry.relative_to.endswith("kept") and entry.unit == "tokens/s" for entry in entries)
    assert said == ["transformers is not installed: ngpt-train[hf]"]
    with pytest.raises(ConfigError, match="bench generation times decoders"):
        next(bench(GPTEncoderDecoderConfig(**SMALL), cpu, torch.float32, in_transformers))


@pytest.mark.parametrize(
    "config", [GPTConfig(**SMALL), NGPTConfig(**SMALL), NormFormerConfig(**SMALL)], ids=lambda x: x.name
)
def test_beside_transformers(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported model generates the same tokens. Caught: a Llama of the same shape in the place of nGPT."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    monkeypatch.setattr(generation, "ROUNDS", 1)
    entries = list(bench(config, torch.device("cpu"), torch.float32, in_transformers, (20,), print))
    there = in_transformers(build_model(config, seed=1).eval(), torch.float32)
    assert [entry.name.endswith("transformers") for entry in entries] == [False, False] + [True] * (there is not None)
    assert (there is None) == (config.name == "normformer")
    if there is not None:
        text = torch.arange(20)[None]
        assert torch.allclose(there(text).logits, build_model(config, seed=1).eval()(text), atol=1e-4)
