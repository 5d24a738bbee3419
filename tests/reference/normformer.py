"""NormFormer (Shleifer et al. 2021), decoder: section 2 and the `+ 3 More LN` row of Table 4.

Which of its operations a model has is seen from the names of its weights.
"""

from typing import Any

import torch
from torch import Tensor

from tests.reference.attention import attention, gelu, positions_in, rope, split_heads


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021)."""
    return x.clamp(min=0) ** 2


ACTIVATIONS = {"gelu": gelu, "relu2": relu2}


def shapes(
    d: int,
    n_layers: int,
    n_heads: int,
    vocab: int,
    *,
    n_kv_heads: int,
    d_mlp: int,
    context: int = 64,
    post_attn_norm: bool = True,
    ffn_norm: bool = True,
    head_scale: str = "before",
    res_scale: bool = False,
    qkv_norm: bool = False,
    bias: bool = True,
    positions: str = "sinusoidal",
    tied: bool = True,
) -> dict[str, tuple[int, ...]]:
    d_k = d // n_heads
    q_size, kv_size = n_heads * d_k, n_kv_heads * d_k

    def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
        return {name: (size,), f"{name}.bias": (size,)}

    table: dict[str, tuple[int, ...]] = {"embedding": (vocab, d)} | norm("norm_final", d)
    if not tied:
        table["output"] = (vocab, d)
    if positions == "learned":
        table["positions"] = (context, d)
    for i in range(n_layers):
        layer: dict[str, tuple[int, ...]] = {
            "wq": (q_size, d),
            "wk": (kv_size, d),
            "wv": (kv_size, d),
            "wo": (q_size, d),
            "w_u": (d_mlp, d),
            "w_down": (d_mlp, d),
        }
        layer |= norm("norm_attn", d) | norm("norm_mlp", d)
        if bias:
            layer |= {"bq": (q_size,), "bk": (kv_size,), "bv": (kv_size,), "bo": (d,), "b_u": (d_mlp,), "b_down": (d,)}
        if post_attn_norm:
            layer |= norm("norm_post_attn", d)
        if ffn_norm:
            layer |= norm("norm_ffn", d_mlp)
        if head_scale != "none":
            layer["head_scale"] = (n_heads,)
        if res_scale:
            layer["res_scale"] = (d,)
        if qkv_norm:
            layer |= norm("norm_q", q_size) | norm("norm_k", kv_size) | norm("norm_v", kv_size)
        table |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return table


def random_weights(table: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """fp64 weights with every gain, scale and bias at least 0.3 away from its initial 1 or 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        kind = name.split(".")[-1]
        if kind == "positions":
            return 0.5 * noise
        if len(shape) == 2:
            return noise * shape[-1] ** -0.5
        noise = noise + noise.sign()
        is_bias = kind in ("bias", "bq", "bk", "bv", "bo", "b_u", "b_down")
        return 0.3 * noise if is_bias else 1 + 0.3 * noise

    return {name: draw(name, shape) for name, shape in table.items()}


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * gain + bias


def sinusoids(t: int, d: int) -> Tensor:
    """Section 3.5 of Vaswani et al. 2017: (t, d), sines at even and cosines at odd dimensions."""
    angle = torch.arange(t, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    n_heads: int,
    head_scale: str = "before",
    positions: str = "sinusoidal",
    activation: str = "gelu",
    rope_base: float = 10000.0,
    rope_layout: str = "half",
    norm_eps: float = 1e-5,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """tokens (B, T) -> logits (B, T, V)."""
    embedding = weights["embedding"]
    d, t = embedding.shape[1], tokens.shape[1]
    d_k = d // n_heads
    x = embedding[tokens] * d**0.5
    place = torch.arange(t) if doc_ids is None else positions_in(doc_ids)
    if positions == "sinusoidal":
        x = x + sinusoids(t, d).to(x.dtype)[place]
    elif positions == "learned":
        x = x + weights["positions"][place]
    else:
        assert positions == "rotary"

    for i in range(sum(name.endswith(".wq") for name in weights)):
        w = {name.removeprefix(f"layers.{i}."): y for name, y in weights.items()}

        def norm(name: str, y: Tensor, w: dict[str, Tensor] = w) -> Tensor:
            return layer_norm(y, w[name], w[f"{name}.bias"], norm_eps) if name in w else y

        def scale_heads(y: Tensor, where: str, w: dict[str, Tensor] = w) -> Tensor:
            if "head_scale" not in w or where != head_scale:
                return y
            return (y.unflatten(-1, (n_heads, d_k)) * w["head_scale"][:, None]).flatten(-2)

        # x <- x + LN(HeadScaleMHA(LN(x)))
        y = norm("norm_attn", x)
        q, k, v = (norm(f"norm_{name}", y @ w[f"w{name}"].T + w.get(f"b{name}", 0)) for name in "qkv")
        q, k, v = (split_heads(z, d_k) for z in (q, k, v))
        if positions == "rotary":
            q, k = (rope(z, rope_base, rope_layout, doc_ids) for z in (q, k))
        k, v = (z.repeat_interleave(n_heads // k.shape[1], dim=1) for z in (k, v))
        heads = scale_heads(attention(q, k, v, d_k**-0.5, doc_ids), "before")
        out = scale_heads(heads @ w["wo"] + w.get("bo", 0), "after")
        x = x + norm("norm_post_attn", out)

        # x <- lambda x + LN(act(LN(x) W_1 + b_1)) W_2 + b_2
        hidden = ACTIVATIONS[activation](norm("norm_mlp", x) @ w["w_u"].T + w.get("b_u", 0))
        x = w.get("res_scale", 1) * x + norm("norm_ffn", hidden) @ w["w_down"] + w.get("b_down", 0)
    final = layer_norm(x, weights["norm_final"], weights["norm_final.bias"], norm_eps)
    return final @ weights.get("output", embedding).T


def n_params(model: Any) -> int:
    """Of a config with the paper's positions and biases."""
    assert (model.positions, model.bias) == ("sinusoidal", True)
    d, ffn = model.d_model, model.d_mlp
    block = 4 * d * d + 4 * d + 2 * d * ffn + ffn + d + 2 * 2 * d  # matrices, biases and the two norms of Pre-LN
    block += 2 * d * model.post_attn_norm + 2 * ffn * model.ffn_norm + model.n_heads * (model.head_scale != "none")
    block += d * model.res_scale + 3 * 2 * d * model.qkv_norm
    return (2 - model.tied_embeddings) * model.vocab_size * d + model.n_layers * block + 2 * d
