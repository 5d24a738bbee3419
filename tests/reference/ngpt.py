"""The normalized Transformer, section 2.6 of the nGPT paper. The vectors are stored as the optimizer sees them."""

import torch
from torch import Tensor

from tests.reference import gpt
from tests.reference.attention import attention, rope, silu, split_heads

MATRICES = ("embedding", "output", "wq", "wk", "wv", "wo", "w_u", "w_v", "w_down")


def shapes(
    d: int, n_layers: int, n_heads: int, vocab: int, *, n_kv_heads: int, d_mlp: int
) -> dict[str, tuple[int, ...]]:
    table = {
        name: shape
        for name, shape in gpt.shapes(d, n_layers, n_heads, vocab, n_kv_heads=n_kv_heads, d_mlp=d_mlp).items()
        if "norm" not in name
    }
    table["s_z"] = (vocab,)
    for i in range(n_layers):
        table |= {f"layers.{i}.{name}": (d,) for name in ("alpha_attn", "alpha_mlp", "s_qk")}
        table |= {f"layers.{i}.{name}": (d_mlp,) for name in ("s_u", "s_v")}
    return table


def initial_vector(name: str, d: int) -> float:
    """Stored value at the start, s_scale: 1 for s_u and s_v, 1/sqrt(d_model) for the others."""
    return 1.0 if name.endswith((".s_u", ".s_v")) else d**-0.5


def random_weights(table: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """fp64 weights with unit rows and every vector well away from its init; half the alphas are negative."""
    generator = torch.Generator().manual_seed(seed)
    d = table["embedding"][1]

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 2:
            return normalize(noise)
        if "alpha" in name:
            return initial_vector(name, d) * 5 * noise
        if name == "s_z":
            # Logits of a real model are far beyond [-1, 1]; without that the loss would hardly depend on h.
            return initial_vector(name, d) * (8 + noise)
        return initial_vector(name, d) * (1 + 0.3 * noise)

    return {name: draw(name, shape) for name, shape in table.items()}


def normalize(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True)).clamp(min=1e-12)


@torch.no_grad()
def project(weights: dict[str, Tensor]) -> None:
    """Every row of every matrix back to unit norm, in place."""
    for name, x in weights.items():
        if name.split(".")[-1] in MATRICES:
            x.copy_(normalize(x))


def forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    n_heads: int,
    rope_base: float = 10000.0,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """tokens (B, T) -> logits (B, T, V)."""
    h = weights["embedding"][tokens]
    d = h.shape[-1]
    d_k = d // n_heads
    for i in range(sum(name.endswith(".wq") for name in weights)):
        w = {name.removeprefix(f"layers.{i}."): x for name, x in weights.items()}
        # effective = stored * init / scale
        alpha_attn = (w["alpha_attn"] * 0.05 * d**0.5).abs()
        alpha_mlp = (w["alpha_mlp"] * 0.05 * d**0.5).abs()
        s_qk = (w["s_qk"] * d**0.5).view(n_heads, 1, d_k)

        q, k, v = (split_heads(h @ w[name].T, d_k) for name in ("wq", "wk", "wv"))
        # Keys are repeated before s_qk, so that with grouped queries each query head has a vector of its own.
        k, v = (x.repeat_interleave(n_heads // k.shape[1], dim=1) for x in (k, v))
        q = normalize(rope(q, rope_base)) * s_qk  # eq. 15
        k = normalize(rope(k, rope_base)) * s_qk  # eq. 16
        h_attn = normalize(attention(q, k, v, d_k**0.5, doc_ids) @ w["wo"])
        h = normalize(h + alpha_attn * (h_attn - h))  # eq. 10

        u = h @ w["w_u"].T * w["s_u"]  # eq. 20
        v = h @ w["w_v"].T * w["s_v"] * d**0.5  # eq. 21
        h_mlp = normalize((u * silu(v)) @ w["w_down"])
        h = normalize(h + alpha_mlp * (h_mlp - h))  # eq. 11
    return h @ weights["output"].T * (weights["s_z"] * d**0.5)  # eq. 3
