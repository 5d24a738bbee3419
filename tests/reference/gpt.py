"""The baseline Transformer: eqs. 4-5, 12-14 and 17-19 of the nGPT paper, optionally with QK-norm."""

from typing import Any

import torch
from torch import Tensor

from tests.reference.attention import attention, gelu, rope, silu, split_heads

ACTIVATIONS = {"silu": silu, "gelu": gelu, "relu2": lambda x: torch.where(x > 0, x * x, 0)}


def shapes(
    d: int,
    n_layers: int,
    n_heads: int,
    vocab: int,
    *,
    n_kv_heads: int,
    d_mlp: int,
    qk_norm: bool = False,
    tied: bool = False,
    mlp: str = "gated",
) -> dict[str, tuple[int, ...]]:
    d_k = d // n_heads
    table: dict[str, tuple[int, ...]] = {"embedding": (vocab, d), "output": (vocab, d), "norm_final": (d,)}
    if tied:
        del table["output"]
    for i in range(n_layers):
        table |= {
            f"layers.{i}.wq": (n_heads * d_k, d),
            f"layers.{i}.wk": (n_kv_heads * d_k, d),
            f"layers.{i}.wv": (n_kv_heads * d_k, d),
            f"layers.{i}.wo": (n_heads * d_k, d),
            f"layers.{i}.w_u": (d_mlp, d),
            f"layers.{i}.w_v": (d_mlp, d),
            f"layers.{i}.w_down": (d_mlp, d),
            f"layers.{i}.norm_attn": (d,),
            f"layers.{i}.norm_mlp": (d,),
        }
        if mlp == "plain":
            del table[f"layers.{i}.w_v"]
        if qk_norm:
            table |= {f"layers.{i}.q_norm": (d_k,), f"layers.{i}.k_norm": (d_k,)}
    return table


def random_weights(table: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """fp64 weights with every gain well away from its initial 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 1 + 0.3 * noise if "norm" in name else noise * shape[-1] ** -0.5

    return {name: draw(name, shape) for name, shape in table.items()}


def forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    n_heads: int,
    rope_base: float = 10000.0,
    rope_layout: str = "half",
    norm_eps: float = 1e-6,
    activation: str = "silu",
    logit_soft_cap: float | None = None,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """tokens (B, T) -> logits (B, T, V). Without `output` the embeddings are tied, without `w_v` there is no gate."""

    def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm_eps) * gain

    h = weights["embedding"][tokens]
    d_k = h.shape[-1] // n_heads
    for i in range(sum(name.endswith(".wq") for name in weights)):
        w = {name.removeprefix(f"layers.{i}."): x for name, x in weights.items()}
        x = rms_norm(h, w["norm_attn"])
        q, k, v = (split_heads(x @ w[name].T, d_k) for name in ("wq", "wk", "wv"))
        if "q_norm" in w:
            q, k = rms_norm(q, w["q_norm"]), rms_norm(k, w["k_norm"])
        q, k = (rope(x, rope_base, rope_layout, doc_ids) for x in (q, k))
        k, v = (x.repeat_interleave(n_heads // k.shape[1], dim=1) for x in (k, v))
        h = h + attention(q, k, v, d_k**-0.5, doc_ids) @ w["wo"]
        x = rms_norm(h, w["norm_mlp"])
        h = h + hidden(w, x, activation) @ w["w_down"]
    z = rms_norm(h, weights["norm_final"]) @ weights.get("output", weights["embedding"]).T
    return capped(z, logit_soft_cap)


def capped(z: Tensor, cap: float | None) -> Tensor:
    return z if cap is None else cap * torch.tanh(z / cap)


def hidden(w: dict[str, Tensor], x: Tensor, activation: str) -> Tensor:
    """Eqs. 17 and 18; without `w_v` the activation is applied to u itself."""
    u = x @ w["w_u"].T
    return u * ACTIVATIONS[activation](x @ w["w_v"].T) if "w_v" in w else ACTIVATIONS[activation](u)


def n_params(model: Any) -> int:
    """Of a config without QK-norm, with as many keys as heads."""
    assert not model.qk_norm
    d, n_layers, ffn, vocabulary = model.d_model, model.n_layers, model.d_mlp, model.vocab_size
    matrices = {"gated": 3, "plain": 2}[model.mlp]
    blocks = n_layers * (4 * d * d + matrices * d * ffn) + (2 * n_layers + 1) * d
    return (2 - model.tied_embeddings) * vocabulary * d + blocks
