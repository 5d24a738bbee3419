"""The TnT paper's N-Transformer, corrected as in nGPT. Its pre-norm baseline is one of reference/composed.py.

The first `source` tokens of a row are the encoder's, the others the decoder's. Document ids below 0 are padding.
Without `output` the decoder's embedding is the output's too; the encoder's is always its own.
"""

from typing import Any

import torch
from torch import Tensor

from tests.reference import ngpt
from tests.reference.attention import attend, rope, split_heads

Shapes = dict[str, tuple[int, ...]]


def complete(scales: ngpt.Scales | None, d: int) -> dict[str, ngpt.Scale]:
    """nGPT's six scales and alpha_C. One s_qk is that of all attentions."""
    return {"alpha_cross": ("vector", 0.05, d**-0.5)} | ngpt.complete(scales, d)


def shapes(
    d: int,
    n_layers: int,
    n_heads: int,
    vocab: int,
    *,
    n_encoder_layers: int,
    n_kv_heads: int,
    d_mlp: int,
    scales: ngpt.Scales | None = None,
    tied: bool = False,
    shared_s_qk: bool = False,
) -> Shapes:
    def stack(layers: int) -> Shapes:
        chosen: Any = {"scales": scales, "tied": tied, "shared_s_qk": shared_s_qk}
        return ngpt.shapes(d, layers, n_heads, vocab, n_kv_heads=n_kv_heads, d_mlp=d_mlp, **chosen)

    options = complete(scales, d)
    table = stack(n_layers) | _encoder(stack(n_encoder_layers)) | {"source_embedding": (vocab, d)}
    for i in range(n_layers):
        table |= {f"layers.{i}.cross.{name}": table[f"layers.{i}.{name}"] for name in ("wq", "wk", "wv", "wo")}
        vectors = {"s_qk": ("cross.s_qk", d // n_heads if shared_s_qk else d), "alpha_cross": ("alpha_cross", d)}
        for name, (key, size) in vectors.items():
            if options[name][0] != "fixed":
                table[f"layers.{i}.{key}"] = (size if options[name][0] == "vector" else 1,)
    return table


def initial_vector(name: str, d: int) -> float:
    """Stored value at the start: the paper gives alpha_C that of the other two."""
    return complete(None, d)[name.split(".")[-1]][2]


def _encoder(decoder: Shapes) -> Shapes:
    """The blocks of a decoder under the encoder's names."""
    return {name.replace("layers.", "encoder."): s for name, s in decoder.items() if name.startswith("layers.")}


def random_weights(
    table: Shapes, seed: int, *, scales: ngpt.Scales | None = None, parametrization: bool = False
) -> dict[str, Tensor]:
    """fp64 weights as nGPT's: unit rows, every vector well away from its init, half the alphas negative."""
    options = complete(scales, table["embedding"][1])
    return ngpt.random_weights(table, seed, scales=options, parametrization=parametrization)


def unit_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with every row of every matrix at unit norm."""
    return {name: ngpt.normalize(x) if x.ndim == 2 else x for name, x in weights.items()}


def masks(doc_ids: Tensor, source: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which keys (last dimension) each query sees in the encoder, the decoder and from the decoder in the encoder."""
    read, written = doc_ids[:, :source], doc_ids[:, source:]
    s, t = read.shape[1], written.shape[1]
    real = (read >= 0)[:, None, :]
    earlier = torch.arange(t)[:, None] >= torch.arange(t)
    return real.expand(-1, s, -1), earlier & (written[:, :, None] == written[:, None, :]), real.expand(-1, t, -1)


def _block(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def _count(weights: dict[str, Tensor], stack: str) -> int:
    return sum(name.startswith(f"{stack}.") and name.endswith(".w_down") for name in weights)


def forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    source: int,
    n_heads: int,
    rope_base: float = 10000.0,
    rope_layout: str = "half",
    scales: ngpt.Scales | None = None,
    alpha_sign: str = "positive",
    qk_norm: bool = True,
    softmax_scale: str = "sqrt(d_k)",
    update: str = "lerp",
    update_attn: str | None = None,
    update_cross: str | None = None,
    update_mlp: str | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    parametrization: bool = False,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """tokens (B, S + T) -> logits (B, T, V)."""
    updates = {"alpha_attn": update_attn, "alpha_cross": update_cross, "alpha_mlp": update_mlp}
    if parametrization:
        weights = unit_rows(weights)
    d = weights["embedding"].shape[1]
    d_k = d // n_heads
    options = complete(scales, d)

    def effective(w: dict[str, Tensor], name: str) -> Tensor:
        kind, init, scale = options[name]
        return torch.full((1,), init, dtype=h.dtype) if kind == "fixed" else w[name] * init / scale

    def attention(w: dict[str, Tensor], h: Tensor, memory: Tensor, visible: Tensor, *, positions: bool) -> Tensor:
        """Eqs. 4, 5 and 10 to 12; self-attention where the memory is h itself."""
        s_qk = ngpt.of_heads(effective(w, "s_qk"), n_heads, d_k)
        q, k, v = (split_heads(x @ w[name].T, d_k) for x, name in ((h, "wq"), (memory, "wk"), (memory, "wv")))
        k, v = (x.repeat_interleave(n_heads // k.shape[1], dim=1) for x in (k, v))
        if positions:
            q, k = rope(q, rope_base, rope_layout), rope(k, rope_base, rope_layout)
        if qk_norm:
            q, k = ngpt.normalize(q, norm_eps), ngpt.normalize(k, norm_eps)
        return attend(q * s_qk, k * s_qk, v, ngpt.softmax_factor(softmax_scale, d, d_k), visible) @ w["wo"]

    def mlp(w: dict[str, Tensor], h: Tensor) -> Tensor:
        u = h @ w["w_u"].T * effective(w, "s_u")
        v = h @ w["w_v"].T * effective(w, "s_v") * d**0.5
        return (u * ngpt.ACTIVATIONS[activation](v)) @ w["w_down"]

    def step(w: dict[str, Tensor], h: Tensor, towards: Tensor, name: str) -> Tensor:
        """The three updates of Table 1; h is on the sphere already."""
        alpha = effective(w, name)
        alpha = {"positive": alpha.abs(), "free": alpha}[alpha_sign]
        moved = ngpt.UPDATES[updates[name] or update](h, ngpt.normalize(towards, norm_eps), alpha)
        return ngpt.normalize(moved, norm_eps)

    in_encoder, in_decoder, across = masks(torch.zeros_like(tokens) if doc_ids is None else doc_ids, source)
    h = weights["source_embedding"][tokens[:, :source]]
    for i in range(_count(weights, "encoder")):
        w = _block(weights, f"encoder.{i}.")
        h = step(w, h, attention(w, h, h, in_encoder, positions=True), "alpha_attn")
        h = step(w, h, mlp(w, h), "alpha_mlp")
    memory = h
    h = weights["embedding"][tokens[:, source:]]
    for i in range(_count(weights, "layers")):
        w = _block(weights, f"layers.{i}.")
        h = step(w, h, attention(w, h, h, in_decoder, positions=True), "alpha_attn")
        h = step(w, h, attention(_block(w, "cross."), h, memory, across, positions=False), "alpha_cross")
        h = step(w, h, mlp(w, h), "alpha_mlp")
    return h @ weights.get("output", weights["embedding"]).T * effective(weights, "s_z")


def _n_params(model: Any, matrices: int, vectors: int, of_cross: int, ends: int) -> int:
    """matrices: of an MLP; vectors: of each block; of_cross: of cross-attention; ends: of the model."""
    d, ffn, n_encoder, n_layers = model.d_model, model.d_mlp, model.n_encoder_layers, model.n_layers
    attention, mlp = 4 * d * d, matrices * d * ffn
    blocks = (n_encoder + n_layers) * (attention + mlp + vectors) + n_layers * (attention + of_cross)
    return 3 * model.vocab_size * d + blocks + ends


def n_params(model: Any) -> int:
    """Of the paper's scales, every one a vector: nGPT's, s_qk and alpha of cross-attention, and s_z."""
    d = model.d_model
    return _n_params(model, 3, 3 * d + 2 * model.d_mlp, 2 * d, model.vocab_size)


def baseline_n_params(model: Any) -> int:
    """Two gains in each block, one of cross-attention, and one at the end of encoder and decoder."""
    d = model.d_model
    return _n_params(model, {"gated": 3, "plain": 2}[model.mlp], 2 * d, d, 2 * d)
