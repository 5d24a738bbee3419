"""Turns a config.json of the Llama family into keys of model=gpt, and refuses what GPT does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ngpt_train.core.errors import DataError

NOTE = "ngpt_train"  # our own entry of config.json; transformers ignores it
ACTIVATIONS = ("silu", "gelu")  # GPT and transformers both mean the exact GELU
# Keys that have a single value in GPT, and every way to write this value.
FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
}
# transformers' defaults for missing keys, by model_type, if they differ from GPT's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
ALSO = {"mistral": "llama"}  # model_type -> the layout with the same equations and names


def model_keys(config_json: Mapping[str, Any], model_type: str, qk_norm: bool) -> dict[str, Any]:
    """The keys of model=gpt. Raises DataError with the key, its value and the allowed values."""
    found = config_json.get("model_type")
    if not isinstance(found, str) or ALSO.get(found, found) != model_type:
        raise refused(config_json, "model_type", f"this layout reads {model_type}")
    config_json = {**DEFAULTS[found], **config_json}
    for key, allowed in FIXED.items():
        if config_json.get(key) not in allowed:
            raise refused(config_json, key, f"GPT has {show(allowed[0])} alone")
    if config_json.get("sliding_window") is not None and config_json.get("use_sliding_window", True):
        raise refused(config_json, "sliding_window", "GPT attends to all earlier tokens, null alone")
    if any(kind != "full_attention" for kind in config_json.get("layer_types") or []):
        raise refused(config_json, "layer_types", "GPT has full_attention alone")
    activation = config_json.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise refused(config_json, "hidden_act", f"GPT has {' and '.join(ACTIVATIONS)}")
    d_model, n_heads = (integer(config_json, key) for key in ("hidden_size", "num_attention_heads"))
    if d_model % n_heads or (d_model // n_heads) % 2:
        raise refused(config_json, "num_attention_heads", f"hidden_size={d_model} has no such heads of an even width")
    n_kv_heads = config_json.get("num_key_value_heads") or n_heads
    if type(n_kv_heads) is not int or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise refused(config_json, "num_key_value_heads", f"a divisor of num_attention_heads={n_heads}")
    if (config_json.get("head_dim") or d_model // n_heads) != d_model // n_heads:
        width = f"GPT has hidden_size / num_attention_heads, {d_model // n_heads}, alone"
        raise refused(config_json, "head_dim", width)
    tied = config_json.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise refused(config_json, "tie_word_embeddings", "true or false")
    return {
        "name": "gpt",
        "d_model": d_model,
        "n_layers": integer(config_json, "num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "d_mlp": integer(config_json, "intermediate_size"),
        "vocab_size": integer(config_json, "vocab_size"),
        "context": integer(config_json, "max_position_embeddings"),
        "tied_embeddings": tied,
        "rope_base": rope_base(config_json),
        "rope_layout": rope_layout(config_json),
        "norm_eps": number(config_json, "rms_norm_eps", 1e-6),
        "qk_norm": qk_norm,
        "mlp": "gated",
        "activation": activation,
    }


def rope_base(config_json: Mapping[str, Any]) -> float:
    """The base of RoPE's angles, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    for key in ("rope_parameters", "rope_scaling"):
        entry = config_json.get(key)
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise refused(config_json, key, "an object, or null")
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind != "default":
            raise refused(config_json, key, "GPT does not scale its angles, rope_type=default alone")
        if entry.get("partial_rotary_factor", 1) != 1:
            raise refused(config_json, key, "GPT turns whole heads, partial_rotary_factor=1 alone")
        if "rope_theta" in entry:
            return number(entry, "rope_theta")
    return number(config_json, "rope_theta", 10000.0)


def rope_layout(config_json: Mapping[str, Any]) -> str:
    """model.rope_layout of the exported run, from our own entry; without one `half`."""
    note = config_json.get(NOTE)
    found = note.get("rope_layout", "half") if isinstance(note, dict) else "half"
    if found not in ("half", "interleaved"):
        raise DataError(f"config.json: {NOTE}.rope_layout={show(found)}: half or interleaved")
    return str(found)


def integer(config_json: Mapping[str, Any], key: str) -> int:
    value = config_json.get(key)
    if type(value) is not int or not 1 <= value <= 10_000_000:
        raise refused(config_json, key, "a whole number from 1 to 10,000,000")
    return value


def number(config_json: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config_json.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= 1e12:
        raise refused(config_json, key, "a number above 0, at most 1e12")
    return float(value)


def refused(config_json: Mapping[str, Any], key: str, allowed: str) -> DataError:
    """The error for an entry of config.json. allowed: its allowed values, in words."""
    return DataError(f"config.json: {key}={show(config_json.get(key))}: {allowed}. This model cannot be imported")


def show(value: Any) -> str:
    """The value as JSON, cut to 200 characters."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
