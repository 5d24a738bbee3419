"""GPT as LlamaForCausalLM and Qwen3ForCausalLM, and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.sections.verbs import LAYOUTS as OFFERED
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.interop.layouts import LAYOUTS, chosen_layout
from ngpt_train.interop.layouts.layout import Layout
from ngpt_train.interop.layouts.llama import LlamaLayout, logits_of_transformers, to_half
from ngpt_train.interop.safetensors_files import write_tensors
from ngpt_train.models import build_model, export_weights, load_weights
from ngpt_train.models.angpt.keys import AnGPTConfig
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from ngpt_train.models.ngpt.keys import NGPTConfig

# Each value of each option, and combinations in the same matrices.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": True, "rope_layout": "interleaved"},
    {"n_kv_heads": 2, "rope_layout": "interleaved", "rope_base": 5e5, "norm_eps": 1e-5},
    {"n_kv_heads": 1, "tied_embeddings": True, "activation": "gelu"},
    {"qk_norm": True, "n_kv_heads": 2, "rope_layout": "interleaved", "norm_eps": 1e-5},
    {"qk_norm": True, "tied_embeddings": True, "d_mlp": 88},
]
NAMES = [", ".join(f"{key}={value}" for key, value in options.items()) or "usual" for options in OPTIONS]


def small(**options: Any) -> GPTConfig:
    return GPTConfig(**{"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "context": 24, **options})


def jittered(config: GPTConfig) -> tuple[Decoder, dict[str, Tensor]]:
    """A model with random gains, so that no two weights are equal."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in export_weights(model).items()
    }
    load_weights(model, weights)
    return model.eval(), weights


def brought_back(
    layout: Layout, config: ModelConfig, there: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model's keys and the foreign tensors, once every bit has come back. there: the content of config.json."""
    foreign = layout.to_foreign(weights, config)
    keys, back = layout.from_foreign(json.loads(json.dumps(there)), foreign)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    assert build_model(type(config)(**keys)).n_params() == sum(value.numel() for value in weights.values())
    return keys, foreign


def in_transformers(kind: str, folder: Path, there: dict[str, Any], foreign: dict[str, Tensor]) -> Any:
    """transformers' model of these files, by its class AutoModelFor...; skips the test without transformers."""
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    (folder / "config.json").write_text(json.dumps(there))
    write_tensors(folder, foreign, 1e9)
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_there_and_back(options: dict[str, Any], tmp_path: Path) -> None:
    """Caught: an import that permutes rows the wrong way, or loses an option: every bit comes back. In transformers: a
    matrix under another name or not transposed, rows of interleaved heads left where they were, gains of q and k that
    did not move with them, another eps, base or activation: the difference would not be 0."""
    config = small(**options)
    model, weights = jittered(config)
    layout = chosen_layout("auto", config)
    assert layout.name == ("qwen3" if config.qk_norm else "llama")
    there = layout.config_json(config)
    keys, foreign = brought_back(layout, config, there, weights)
    expected = {**vars(config), "n_kv_heads": config.n_kv_heads or 4, "d_mlp": config.d_mlp or 256}
    assert keys == {name: expected[name] for name in keys}

    exported = in_transformers("AutoModelForCausalLM", tmp_path, there, foreign)
    assert type(exported).__name__ == there["architectures"][0]
    rows = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = exported(rows).logits
        assert torch.equal(found, logits_of_transformers(weights, config, rows))
        # Of about 20 roundings of 2^-24, on logits of some 5.
        torch.testing.assert_close(found, model(rows), rtol=0, atol=1e-4)
        assert found.abs().max() > 1


def test_interleaved_without_note() -> None:
    """Caught: a model of another program taken for interleaved; without our note its pairs are (i, i + d/2)."""
    config = small(rope_layout="interleaved")
    interleaved, weights = jittered(config)
    layout = LlamaLayout()
    there = {key: value for key, value in layout.config_json(config).items() if key != "ngpt_train"}
    keys, back = layout.from_foreign(there, layout.to_foreign(weights, config))
    assert keys["rope_layout"] == "half"
    assert torch.equal(back["layers.0.wq"], to_half(weights["layers.0.wq"], 16))
    rows = torch.arange(24)[None]
    model = build_model(GPTConfig(**keys))
    load_weights(model, back)
    with torch.no_grad():
        torch.testing.assert_close(model(rows), interleaved(rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "rope_type=default alone"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*does not scale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "turns whole heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: GPT has 1 alone"),
        ({"attention_bias": True}, "attention_bias=true: GPT has false alone"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"hidden_act": "relu"}, 'hidden_act="relu": GPT has silu and gelu'),
        ({"head_dim": 32}, "head_dim=32: .* 16, alone"),
        ({"sliding_window": 512}, "sliding_window=512"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_attention_heads": 5}, "num_attention_heads=5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": "64"}, 'hidden_size="64"'),
        ({"vocab_size": None}, "vocab_size=null"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"model_type": "gemma"}, 'model_type="gemma"'),
        ({"model_type": "mistral", "num_key_value_heads": 4}, "sliding_window=4096"),
        ({"model_type": "mistral", "sliding_window": 512}, "sliding_window=512"),
        ({"ngpt_train": {"rope_layout": "spiral"}}, "rope_layout"),
        (
            {"intermediate_size": 100},
            r"mlp.gate_proj.weight has shape \(256, 64\), and should have \(100, 64\)",
        ),
        ({"num_hidden_layers": 3}, "missing: model.layers.2"),
        ({"num_hidden_layers": 1}, "unknown: model.layers.1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=true, but lm_head.weight is not"),
    ],
)
def test_what_does_not_fit_is_refused(entry: dict[str, Any], message: str) -> None:
    """Caught: an entry of config.json that changes the equations and is passed over."""
    config = small()
    layout = LlamaLayout()
    foreign = layout.to_foreign(export_weights(build_model(config)), config)
    there = layout.config_json(config)
    with pytest.raises(DataError, match=message):
        layout.from_foreign({**there, **entry}, foreign)


def test_old_files() -> None:
    """Caught: files of transformers before 5, with rope_theta beside and tables of angles, that are not read."""
    config = small(rope_base=5e4, tied_embeddings=True)
    layout = LlamaLayout()
    weights = export_weights(build_model(config))
    foreign = layout.to_foreign(weights, config)
    foreign["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    foreign["lm_head.weight"] = foreign["model.embed_tokens.weight"].clone()
    there = layout.config_json(config)
    del there["rope_parameters"], there["head_dim"], there["ngpt_train"]
    keys, back = layout.from_foreign({**there, "rope_scaling": None}, foreign)
    assert keys["rope_base"] == 5e4
    assert back.keys() == weights.keys()


def test_biases_are_named() -> None:
    """Caught: a bias that config.json does not announce, left out without a word."""
    config = small()
    layout = LlamaLayout()
    foreign = layout.to_foreign(export_weights(build_model(config)), config)
    foreign["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(DataError, match=r"q_proj.bias \(64,\), and the model has no biases"):
        layout.from_foreign(layout.config_json(config), foreign)


@pytest.mark.parametrize(
    ("config", "auto", "named", "message"),
    [
        (small(mlp="plain"), "safetensors", "llama", "model.mlp=plain"),
        (small(logit_soft_cap=30.0), "safetensors", "llama", "model.logit_soft_cap=30"),
        (small(qk_norm=True), "qwen3", "llama", "model.qk_norm=true"),
        (small(), "llama", "qwen3", "model.qk_norm=false"),
        (NGPTConfig(), "ngpt", "llama", "model.name=ngpt"),
        (AnGPTConfig(), "angpt", "qwen3", "model.name=angpt"),
        (NGPTConfig(), "ngpt", "angpt", "model.name=ngpt"),
        (GPTEncoderDecoderConfig(), "safetensors", "llama", "model.name=gpt_encoder_decoder"),
    ],
)
def test_layouts(config: Any, auto: str, named: str, message: str) -> None:
    """Caught: a model written in a layout whose equations are others; a layout that export.layout does not offer."""
    assert chosen_layout("auto", config) is chosen_layout(auto, config)
    with pytest.raises(ConfigError, match=rf"export.layout={named}: {message}.*\n  Set export.layout={auto}"):
        chosen_layout(named, config)
    assert tuple(LAYOUTS) == OFFERED
