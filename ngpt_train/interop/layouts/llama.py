"""GPT as transformers' LlamaForCausalLM, with QK-norm as its Qwen3ForCausalLM, and back.

Both have GPT's equations, but store two things differently. W_o and W_down are transposed. The pairs of RoPE are
(i, i + d_head/2), so rows of W_q and W_k move if GPT pairs 2i with 2i + 1.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.layout import NOTE, Json, Layout, Tensors, check_tensors, turned, turned_shapes
from ngpt_train.models.gpt.keys import GPTConfig

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
OF_LAYER = {
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "w_v": "mlp.gate_proj.weight",  # the hidden layer is u * act(v)
    "w_u": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "norm_attn": "input_layernorm.weight",
    "norm_mlp": "post_attention_layernorm.weight",
}
ROTATED = ("wq", "wk", "q_norm", "k_norm")  # RoPE pairs their rows
INV_FREQ = "rotary_emb.inv_freq"  # a table of RoPE's frequencies in old files; rope_theta gives it too
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


class LlamaLayout(Layout):
    """GPT without QK-norm: LlamaForCausalLM."""

    name = "llama"  # also the model_type of config.json
    for_transformers = True
    files = ()
    architecture = "LlamaForCausalLM"
    qk_norm = False

    def refusal(self, config: ModelConfig) -> str | None:
        if type(config) is not GPTConfig:  # a subclass has more, such as an encoder
            return f"model.name={config.name}: {self.architecture} has GPT's equations"
        assert isinstance(config, GPTConfig)
        if config.mlp != "gated":
            return f"model.mlp={config.mlp}: the MLP of {self.architecture} has a gate"
        if config.logit_soft_cap is not None:
            return f"model.logit_soft_cap={config.logit_soft_cap:g}: {self.architecture} has no cap of the logits"
        if config.qk_norm != self.qk_norm:
            a = "a" if self.qk_norm else "no"
            return f"model.qk_norm={str(config.qk_norm).lower()}: {self.architecture} has {a} norm of q and k"
        return None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, GPTConfig)
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.d_mlp or 4 * config.d_model,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads or config.n_heads,
            "head_dim": config.d_head,
            "hidden_act": config.activation,
            "max_position_embeddings": config.context,
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tied_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
            "rope_theta": config.rope_base,  # for transformers before 5
            **({"use_sliding_window": False, "sliding_window": None} if self.qk_norm else {"mlp_bias": False}),
            NOTE: {"rope_layout": config.rope_layout},
        }

    def to_foreign(self, weights: Tensors, config: ModelConfig) -> dict[str, Tensor]:
        return {place: _stored(name, weights[name], config, to_half) for name, place in names(config).items()}

    def from_foreign(self, config_json: Json, weights: Tensors) -> tuple[dict[str, Any], dict[str, Tensor]]:
        keys = model_keys(config_json, self.name, self.qk_norm)
        config = GPTConfig(**keys)
        weights = {name: value for name, value in weights.items() if not name.endswith(INV_FREQ)}
        if config.tied_embeddings and OUTPUT in weights:
            output = weights.pop(OUTPUT)
            if not torch.equal(output, weights.get(EMBEDDING, output[:0])):
                problem = f"tie_word_embeddings=true, but {OUTPUT} is not {EMBEDDING}"
                raise DataError(f"config.json: {problem}. Set tie_word_embeddings to false")
        shapes, places = turned_shapes(config, weights), names(config)
        check_tensors(weights, {place: shapes[name] for name, place in places.items()})
        return keys, {name: _stored(name, weights[place], config, to_interleaved) for name, place in places.items()}


class Qwen3Layout(LlamaLayout):
    """GPT with QK-norm: Qwen3ForCausalLM, whose q and k pass an RMSNorm over the head before RoPE, too."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True


def names(config: ModelConfig) -> dict[str, str]:
    """Llama's name for each canonical name."""
    assert isinstance(config, GPTConfig)
    found = {"embedding": EMBEDDING}
    for i in range(config.n_layers):
        for part, place in OF_LAYER.items():
            if config.qk_norm or part not in ("q_norm", "k_norm"):
                found[f"layers.{i}.{part}"] = f"model.layers.{i}.{place}"
    found["norm_final"] = "model.norm.weight"
    return found if config.tied_embeddings else {**found, "output": OUTPUT}


def _stored(name: str, weight: Tensor, config: ModelConfig, reorder: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The weight as the other side stores it. reorder: `to_half` for an export, `to_interleaved` for an import."""
    if name.rpartition(".")[2] in ROTATED and config.rope_layout == "interleaved":
        return reorder(weight, config.d_head)
    return turned(name, weight)


def to_half(rows: Tensor, d_head: int) -> Tensor:
    """Reorders rows `(heads * d_head, ...)`, in each head from RoPE's pairs (2i, 2i + 1) to (i, i + d_head/2)."""
    return rows.unflatten(0, (-1, d_head // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_interleaved(rows: Tensor, d_head: int) -> Tensor:
    """The inverse of `to_half`."""
    return rows.unflatten(0, (-1, 2, d_head // 2)).transpose(1, 2).flatten(0, 2)


def model_keys(config_json: Json, model_type: str, qk_norm: bool) -> dict[str, Any]:
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
    d_head = d_model // n_heads
    if d_model % n_heads or d_head % 2:
        raise refused(config_json, "num_attention_heads", f"hidden_size={d_model} has no such heads of an even width")
    n_kv_heads = config_json.get("num_key_value_heads") or n_heads
    if type(n_kv_heads) is not int or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise refused(config_json, "num_key_value_heads", f"a divisor of num_attention_heads={n_heads}")
    if (config_json.get("head_dim") or d_head) != d_head:
        raise refused(config_json, "head_dim", f"GPT has hidden_size / num_attention_heads, {d_head}, alone")
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


def rope_base(config_json: Json) -> float:
    """The base of RoPE's angles, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    for key in ("rope_parameters", "rope_scaling"):
        if (entry := config_json.get(key)) is None:
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


def rope_layout(config_json: Json) -> str:
    """model.rope_layout of the exported run, from our own entry; without one `half`."""
    note = config_json.get(NOTE)
    found = note.get("rope_layout", "half") if isinstance(note, dict) else "half"
    if found not in ("half", "interleaved"):
        raise DataError(f"config.json: {NOTE}.rope_layout={show(found)}: half or interleaved")
    return str(found)


def integer(config_json: Json, key: str) -> int:
    value = config_json.get(key)
    if type(value) is not int or not 1 <= value <= 10_000_000:
        raise refused(config_json, key, "a whole number from 1 to 10,000,000")
    return value


def number(config_json: Json, key: str, default: float | None = None) -> float:
    value = config_json.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= 1e12:
        raise refused(config_json, key, "a number above 0, at most 1e12")
    return float(value)


def refused(config_json: Json, key: str, allowed: str) -> DataError:
    """The error for an entry of config.json. allowed: its allowed values, in words."""
    return DataError(f"config.json: {key}={show(config_json.get(key))}: {allowed}. This model cannot be imported")


def show(value: Any) -> str:
    """The value as JSON, cut to 200 characters."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def logits_of_transformers(weights: Tensors, config: GPTConfig, tokens: Tensor) -> Tensor:
    """GPT's logits `(B, T, V)` of tokens `(B, T)` in transformers' order of operations, in fp32 on a CPU.

    Our own forward pass computes RoPE's angles in fp64 and several matrices in one product; transformers computes the
    angles in fp32 and one product for each matrix. Their roundings differ, and could hide a small mistake of an export.
    This function rounds as transformers does, so its difference to an exported model is 0. weights: by canonical name,
    fp32. It copies one layer at a time.
    """
    n_kv_heads, d_head = config.n_kv_heads or config.n_heads, config.d_head
    cos, sin = angles(tokens.shape[1], d_head, config.rope_base)
    act = F.silu if config.activation == "silu" else F.gelu

    def in_pairs(rows: Tensor) -> Tensor:
        return to_half(rows, d_head) if config.rope_layout == "interleaved" else rows

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps))

    h = F.embedding(tokens, weights["embedding"])  # (B, T, d_model)
    for layer in (f"layers.{i}" for i in range(config.n_layers)):

        def heads(x: Tensor, name: str, layer: str = layer) -> Tensor:
            w = weights[f"{layer}.w{name}"]
            x = F.linear(x, in_pairs(w) if name != "v" else w).unflatten(-1, (-1, d_head))
            if config.qk_norm and name != "v":
                x = norm(x, in_pairs(weights[f"{layer}.{name}_norm"]))
            x = x.transpose(1, 2)  # (B, H, T, D)
            return x if name == "v" else x * cos + torch.cat((-x[..., d_head // 2 :], x[..., : d_head // 2]), -1) * sin

        x = norm(h, weights[f"{layer}.norm_attn"])
        q, k, v = (heads(x, name) for name in "qkv")
        grouped = n_kv_heads < config.n_heads
        x = F.scaled_dot_product_attention(q, k, v, is_causal=len(x[0]) > 1, scale=d_head**-0.5, enable_gqa=grouped)
        h = h + F.linear(x.transpose(1, 2).flatten(2), weights[f"{layer}.wo"].T.contiguous())
        x = norm(h, weights[f"{layer}.norm_mlp"])
        hidden = act(F.linear(x, weights[f"{layer}.w_v"])) * F.linear(x, weights[f"{layer}.w_u"])
        h = h + F.linear(hidden, weights[f"{layer}.w_down"].T.contiguous())
    return F.linear(norm(h, weights["norm_final"]), weights["embedding" if config.tied_embeddings else "output"])


def angles(length: int, d_head: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin `(T, d_head)` of the angles in fp32; the second half repeats the first."""
    frequencies = 1.0 / (base ** (torch.arange(0, d_head, 2, dtype=torch.float) / d_head))
    turned = torch.arange(length)[:, None].float() * frequencies
    both = torch.cat((turned, turned), -1)
    return both.cos(), both.sin()
