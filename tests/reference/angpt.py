"""The approximately normalized GPT (arXiv 2505.22014) with every constant in its printed place: E|h| = 1 at the start.

W_o and W_down consist of vectors of d numbers, as nGPT's. So W_down has no constant: sqrt(d_mlp / d), as printed,
belongs to vectors of d_mlp numbers.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.reference import ngpt
from tests.reference.attention import attention, rope, silu, split_heads
from tests.reference.ngpt import normalize

ALPHA, S_Z = 0.01, 1.0  # in use at the start; both are stored as 1 / sqrt(d)


def shapes(
    d: int, n_layers: int, n_heads: int, vocab: int, *, n_kv_heads: int, d_mlp: int, tied: bool = False
) -> dict[str, tuple[int, ...]]:
    table = ngpt.shapes(d, n_layers, n_heads, vocab, n_kv_heads=n_kv_heads, d_mlp=d_mlp, tied=tied)
    return {name: shape for name, shape in table.items() if name.split(".")[-1] not in ("s_qk", "s_u", "s_v")}


def random_weights(table: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """fp64 weights with rows of lengths from 0.5 to 1, alphas of both signs up to some tenths, and large logits."""
    generator = torch.Generator().manual_seed(seed)
    d = table["embedding"][1]

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 2:
            return normalize(noise) * (0.5 + 0.5 * torch.rand(shape[0], 1, generator=generator, dtype=torch.float64))
        return d**-0.5 * (20 * noise if "alpha" in name else 8 + noise)

    return {name: draw(name, shape) for name, shape in table.items()}


@cache
def nu_acf(deviation: float) -> float:
    """1 / sqrt(E SiLU(x)^2) for x from N(0, deviation^2), by Gauss and Hermite."""
    x, weight = (torch.from_numpy(found) for found in np.polynomial.hermite_e.hermegauss(80))
    return float((silu(deviation * x).square() * weight).sum() / weight.sum()) ** -0.5


@torch.no_grad()
def project(weights: dict[str, Tensor]) -> None:
    """Every row of every matrix that is longer than 1 back to length 1, in place."""
    for x in weights.values():
        if x.ndim == 2:
            length = x.norm(dim=1, keepdim=True)
            x.copy_(torch.where(length > 1, x / length, x))


def forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    n_heads: int,
    rope_base: float = 10000.0,
    rope_layout: str = "half",
    doc_ids: Tensor | None = None,
) -> Tensor:
    """tokens (B, T) -> logits (B, T, V). Without `output` the embeddings are tied."""
    h = weights["embedding"][tokens]
    d = h.shape[-1]
    d_k = d // n_heads
    nu_qkv, nu_p = math.sqrt(d / d_k), math.sqrt(d_k / d)

    def moved(h: Tensor, x: Tensor, stored: Tensor) -> Tensor:
        alpha = stored * d**0.5 * ALPHA
        return ((1 - alpha) * h + alpha * x) / torch.sqrt(alpha**2 + (1 - alpha) ** 2)

    for i in range(sum(name.endswith(".wq") for name in weights)):
        w = {name.removeprefix(f"layers.{i}."): x for name, x in weights.items()}
        q, k, v = (nu_qkv * split_heads(h @ w[name].T, d_k) for name in ("wq", "wk", "wv"))
        k, v = (x.repeat_interleave(n_heads // k.shape[1], dim=1) for x in (k, v))
        q, k = (normalize(rope(x, rope_base, rope_layout, doc_ids)) for x in (q, k))
        h = moved(h, nu_p * attention(q, k, v, d_k**0.5, doc_ids) @ w["wo"], w["alpha_attn"])
        nu_uv = math.sqrt(d / len(w["w_u"]))
        u, v = (nu_uv * h @ w[name].T for name in ("w_u", "w_v"))
        h = moved(h, (u * nu_acf(nu_uv) * silu(d**0.5 * v)) @ w["w_down"], w["alpha_mlp"])
    return h @ weights.get("output", weights["embedding"]).T * weights["s_z"] * d**0.5 * S_Z


def n_params(model: Any) -> int:
    """Of a config with as many keys as heads."""
    d, n_layers, ffn, vocabulary = model.d_model, model.n_layers, model.d_mlp, model.vocab_size
    return (2 - model.tied_embeddings) * vocabulary * d + n_layers * (4 * d * d + 3 * d * ffn + 2 * d) + vocabulary
