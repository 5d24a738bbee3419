"""The normalized Transformer, section 2.6 of the nGPT paper, and its ablations.

The scales are stored as the optimizer sees them (section 2.5): effective = stored * init / scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference import gpt
from tests.reference.attention import attention, gelu, rope, silu, split_heads

MATRICES = ("embedding", "output", "wq", "wk", "wv", "wo", "w_u", "w_v", "w_down")
ACTIVATIONS = {"silu": silu, "gelu": gelu}

Scale = tuple[str, float, float]  # kind (vector, scalar or fixed), init, scale
Scales = Mapping[str, Scale]


def complete(scales: Scales | None, d: int) -> dict[str, Scale]:
    """All six scales: those given, and section 2.6 for the others."""
    paper = {
        "alpha_attn": ("vector", 0.05, d**-0.5),
        "alpha_mlp": ("vector", 0.05, d**-0.5),
        "s_qk": ("vector", 1.0, d**-0.5),
        "s_u": ("vector", 1.0, 1.0),
        "s_v": ("vector", 1.0, 1.0),
        "s_z": ("vector", 1.0, d**-0.5),
    }
    return paper | dict(scales or {})


def shapes(
    d: int,
    n_layers: int,
    n_heads: int,
    vocab: int,
    *,
    n_kv_heads: int,
    d_mlp: int,
    scales: Scales | None = None,
    tied: bool = False,
    shared_s_qk: bool = False,
) -> dict[str, tuple[int, ...]]:
    baseline = gpt.shapes(d, n_layers, n_heads, vocab, n_kv_heads=n_kv_heads, d_mlp=d_mlp, tied=tied)
    table = {name: shape for name, shape in baseline.items() if "norm" not in name}
    vectors = {"s_z": vocab}
    for i in range(n_layers):
        vectors |= {f"layers.{i}.{name}": d for name in ("alpha_attn", "alpha_mlp", "s_qk")}
        if shared_s_qk:
            vectors[f"layers.{i}.s_qk"] = d // n_heads
        vectors |= {f"layers.{i}.{name}": d_mlp for name in ("s_u", "s_v")}
    for name, length in vectors.items():
        kind = complete(scales, d)[name.split(".")[-1]][0]
        if kind != "fixed":
            table[name] = ({"vector": length, "scalar": 1}[kind],)
    return table


def initial_vector(name: str, d: int, scales: Scales | None = None) -> float:
    """Stored value at the start, s_scale: in the paper 1 for s_u and s_v, 1/sqrt(d_model) for the others."""
    return complete(scales, d)[name.split(".")[-1]][2]


def random_weights(
    table: dict[str, tuple[int, ...]], seed: int, *, scales: Scales | None = None, parametrization: bool = False
) -> dict[str, Tensor]:
    """fp64 weights with unit rows and every vector well away from its init; half the alphas are negative.

    With `parametrization` the rows have lengths of 0.3 to 0.6 or of 1.5 to 3.
    """
    generator = torch.Generator().manual_seed(seed)
    d = table["embedding"][1]

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 2:
            rows = normalize(noise)
            if parametrization:
                u = torch.rand(shape[0], 2, 1, generator=generator, dtype=torch.float64)
                rows = rows * (0.3 + 0.3 * u[:, 0]) * torch.where(u[:, 1] < 0.5, 1, 5)
            return rows
        stored = initial_vector(name, d, scales)
        if shape == (1,):
            noise = noise.sign()  # A single number could fall on its init.
            if "alpha" in name:
                _, layer, which = name.split(".")
                noise = noise.abs() * (-1) ** (int(layer) + (which == "alpha_attn"))
        if "alpha" in name:
            return stored * 5 * noise
        if name == "s_z":
            # Logits of a real model are far beyond [-1, 1]; without that the loss would hardly depend on h.
            return stored * (8 + noise)
        return stored * (1 + 0.3 * noise)

    return {name: draw(name, shape) for name, shape in table.items()}


def normalize(x: Tensor, eps: float = 0.0) -> Tensor:
    square = (x * x).sum(-1, keepdim=True)
    return x / torch.sqrt(square + eps) if eps else x / torch.sqrt(square).clamp(min=1e-12)


def softmax_factor(word: str, d: int, d_k: int) -> float:
    return {"sqrt(d_k)": d_k**0.5, "1/sqrt(d_k)": d_k**-0.5, "d/sqrt(d_k)": d * d_k**-0.5}[word]


def of_heads(s_qk: Tensor, n_heads: int, d_k: int) -> Tensor:
    """s_qk of every head (heads, 1, d_k), or one of all of them (d_k,): a vector of d_k numbers, or a single number."""
    return s_qk.view(n_heads, 1, d_k) if len(s_qk) == n_heads * d_k else s_qk.expand(d_k)


def unit_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with every row of every matrix at unit norm."""
    return {name: normalize(x) if name.split(".")[-1] in MATRICES else x for name, x in weights.items()}


@torch.no_grad()
def project(weights: dict[str, Tensor]) -> None:
    """Every row of every matrix back to unit norm, in place."""
    for name, x in unit_rows(weights).items():
        weights[name].copy_(x)


def lerp(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    """Eq. 8."""
    return a + alpha * (b - a)


def slerp(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    """Eq. 6 for unit vectors, with an alpha for each dimension."""
    theta = torch.arccos((a * b).sum(-1, keepdim=True))
    return torch.sin((1 - alpha) * theta) / torch.sin(theta) * a + torch.sin(alpha * theta) / torch.sin(theta) * b


def riemannian(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    """Eq. 25 before its Norm: B is the diagonal matrix of alpha, a^T b the cosine of the two."""
    return a - alpha * (a * (a * b).sum(-1, keepdim=True) - b)


UPDATES = {"lerp": lerp, "slerp": slerp, "riemannian": riemannian}


def forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    n_heads: int,
    rope_base: float = 10000.0,
    rope_layout: str = "half",
    scales: Scales | None = None,
    alpha_sign: str = "positive",
    qk_norm: bool = True,
    softmax_scale: str = "sqrt(d_k)",
    update: str = "lerp",
    update_attn: str | None = None,
    update_mlp: str | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    parametrization: bool = False,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """tokens (B, T) -> logits (B, T, V). Without `output` the embeddings are tied.

    norm_eps: of the Norm of activations, which are all but the rows of `parametrization`.
    """
    if parametrization:
        weights = unit_rows(weights)
    h = weights["embedding"][tokens]
    d = h.shape[-1]
    d_k = d // n_heads
    options = complete(scales, d)

    def effective(w: dict[str, Tensor], name: str) -> Tensor:
        kind, init, scale = options[name]
        return torch.full((1,), init, dtype=h.dtype) if kind == "fixed" else w[name] * init / scale

    def learning_rate(w: dict[str, Tensor], name: str) -> Tensor:
        alpha = effective(w, name)
        return {"positive": alpha.abs(), "free": alpha}[alpha_sign]

    def norm(x: Tensor) -> Tensor:
        return normalize(x, norm_eps)

    for i in range(sum(name.endswith(".wq") for name in weights)):
        w = {name.removeprefix(f"layers.{i}."): x for name, x in weights.items()}
        s_qk = of_heads(effective(w, "s_qk"), n_heads, d_k)

        q, k, v = (split_heads(h @ w[name].T, d_k) for name in ("wq", "wk", "wv"))
        # Keys are repeated before s_qk, so that with grouped queries each query head has a vector of its own.
        k, v = (x.repeat_interleave(n_heads // k.shape[1], dim=1) for x in (k, v))
        q, k = (rope(x, rope_base, rope_layout, doc_ids) for x in (q, k))
        if qk_norm:
            q, k = norm(q), norm(k)
        q, k = q * s_qk, k * s_qk  # eqs. 15 and 16
        h_attn = norm(attention(q, k, v, softmax_factor(softmax_scale, d, d_k), doc_ids) @ w["wo"])
        h = norm(UPDATES[update_attn or update](h, h_attn, learning_rate(w, "alpha_attn")))  # eq. 10

        u = h @ w["w_u"].T * effective(w, "s_u")  # eq. 20
        v = h @ w["w_v"].T * effective(w, "s_v") * d**0.5  # eq. 21
        h_mlp = norm((u * ACTIVATIONS[activation](v)) @ w["w_down"])
        h = norm(UPDATES[update_mlp or update](h, h_mlp, learning_rate(w, "alpha_mlp")))  # eq. 11
    return h @ weights.get("output", weights["embedding"]).T * effective(weights, "s_z")  # eq. 3


def n_params(model: Any) -> int:
    """Of a config with as many keys as heads; a scale is a vector, a number, or not learned."""

    def scale(vector: Any, size: int) -> int:
        return {"vector": size, "scalar": 1, "fixed": 0}[vector.kind]

    d, n_layers, ffn, vocabulary = model.d_model, model.n_layers, model.d_mlp, model.vocab_size
    scales = (
        scale(model.s_qk, d // model.n_heads if model.s_qk.shared else d)
        + scale(model.s_u, ffn)
        + scale(model.s_v, ffn)
    )
    scales += scale(model.alpha_attn, d) + scale(model.alpha_mlp, d)
    embeddings = (2 - model.tied_embeddings) * vocabulary * d
    return embeddings + n_layers * (4 * d * d + 3 * d * ffn + scales) + scale(model.s_z, vocabulary)
