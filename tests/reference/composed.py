"""The composed decoder and encoder-decoder: one Transformer whose norms, their places and other parts are options.

With options it is NormFormer too (Shleifer et al. 2021: section 2, and the `+ 3 More LN` row of Table 4). Options have
the names of the keys of model.*; `DEFAULTS` has the values of those that are not given.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference.attention import attend, causal, gelu, positions_in, rope, silu, split_heads
from tests.reference.ntransformer import masks

Shapes = dict[str, tuple[int, ...]]
Norms = Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]  # as of reference/powernorm.py, by place

DEFAULTS: dict[str, Any] = {
    "norm": "rms",
    "norm_placement": "pre",
    "attn_norm_placement": None,
    "mlp_norm_placement": None,
    "separate_gains": False,
    "ffn_norm": "none",
    "qk_norm": False,
    "qkv_norm": False,
    "head_scale": "none",
    "res_scale": "none",
    "layer_scale": None,
    "mlp": "gated",
    "activation": "silu",
    "bias": False,
    "positions": "rotary",
    "scaled_embedding": False,
    "embedding_gradient": 1.0,
    "tied_embeddings": False,
    "rope_layout": "half",
    "rope_base": 10000.0,
    "norm_eps": 1e-5,
}
ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "relu": lambda x: torch.where(x > 0, x, 0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0),
}


def placements(o: Mapping[str, Any]) -> tuple[str, str]:
    """Those of attention and of the MLP."""
    return o["attn_norm_placement"] or o["norm_placement"], o["mlp_norm_placement"] or o["norm_placement"]


def shapes(
    d: int,
    n_layers: int,
    n_heads: int,
    vocab: int,
    *,
    n_kv_heads: int,
    d_mlp: int,
    n_encoder_layers: int | None = None,
    context: int = 64,
    **options: Any,
) -> Shapes:
    o = DEFAULTS | options
    d_k = d // n_heads
    d_q, d_kv = n_heads * d_k, n_kv_heads * d_k
    of_attention, of_mlp = placements(o)

    def norm(name: str, size: int) -> Shapes:
        gain, bias = {name: (size,)}, {f"{name}.bias": (size,)}
        if o["norm"] in ("rms", "layer_no_bias"):
            return gain
        if o["norm"] in ("layer_no_gain", "layer_plain"):
            return bias if o["norm"] == "layer_no_gain" else {}
        learned = {"dyt": ["alpha"], "derf": ["alpha", "shift"]}.get(o["norm"], [])
        return gain | bias | {f"{name}.{part}": (1,) for part in learned}

    def around(name: str, placement: str) -> Shapes:
        shared = placement in ("pre", "peri") and not o["separate_gains"]
        found = norm(f"norm_{name}", d) if shared else {}
        if placement in ("post", "peri", "reordered"):
            found |= norm(f"norm_post_{name}", d)
        if o["res_scale"] in ("both", "mlp" if name == "mlp" else "attn"):
            found["res_scale" if name == "mlp" else f"res_scale_{name}"] = (d,)
        if o["layer_scale"] is not None:
            found[f"layer_scale_{name}"] = (d,)
        return found

    def attention() -> Shapes:
        found: Shapes = {"wq": (d_q, d), "wk": (d_kv, d), "wv": (d_kv, d), "wo": (d_q, d)}
        if o["bias"]:
            found |= {"bq": (d_q,), "bk": (d_kv,), "bv": (d_kv,), "bo": (d,)}
        if o["qk_norm"]:
            found |= norm("q_norm", d_k) | norm("k_norm", d_k)
        if o["qkv_norm"]:
            found |= norm("norm_q", d_q) | norm("norm_k", d_kv) | norm("norm_v", d_kv)
        if o["head_scale"] != "none":
            found["head_scale"] = (n_heads,)
        return found | ({f"gain_w{x}": (d,) for x in "qkv"} if o["separate_gains"] else {})

    block = attention() | around("attn", of_attention) | around("mlp", of_mlp)
    block |= {"w_u": (d_mlp, d), "w_down": (d_mlp, d)} | ({"w_v": (d_mlp, d)} if o["mlp"] == "gated" else {})
    if o["bias"]:
        block |= {"b_u": (d_mlp,), "b_down": (d,)} | ({"b_v": (d_mlp,)} if o["mlp"] == "gated" else {})
    if o["separate_gains"]:
        block |= {f"gain_w_{x}": (d,) for x in ("uv" if o["mlp"] == "gated" else "u")}
    if o["ffn_norm"] == "norm":
        block |= norm("norm_ffn", d_mlp)
    if o["ffn_norm"] == "gain":
        block["norm_ffn"] = (d_mlp,)

    table: Shapes = {"embedding": (vocab, d)}
    if not o["tied_embeddings"]:
        table["output"] = (vocab, d)
    if o["positions"] == "learned":
        table["positions"] = (context, d)
    ends = ["norm_final"] if n_encoder_layers is None else ["norm_final", "norm_encoder"]
    for name in ends if of_mlp != "post" else []:
        table |= norm(name, d)
    table |= {f"layers.{i}.{name}": shape for i in range(n_layers) for name, shape in block.items()}
    if n_encoder_layers is not None:
        table["source_embedding"] = (vocab, d)
        table |= {f"encoder.{i}.{name}": shape for i in range(n_encoder_layers) for name, shape in block.items()}
        cross = {f"cross.{name}": shape for name, shape in attention().items()} | around("cross", of_attention)
        table |= {f"layers.{i}.{name}": shape for i in range(n_layers) for name, shape in cross.items()}
    return table


def random_weights(table: Shapes, seed: int) -> dict[str, Tensor]:
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
        is_bias = kind in ("bias", "bq", "bk", "bv", "bo", "b_u", "b_v", "b_down")
        return 0.3 * noise if is_bias else 1 + 0.3 * noise

    return {name: draw(name, shape) for name, shape in table.items()}


def normalized(x: Tensor, gain: Any, bias: Any, alpha: Any, shift: Any, kind: str, eps: float) -> Tensor:
    if kind == "dyt":
        return gain * torch.tanh(alpha * x) + bias
    if kind == "derf":
        return gain * torch.erf(alpha * x + shift) + bias
    if kind == "rms":
        return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    if kind == "cogview":
        x = x / x.abs().amax(-1, keepdim=True)
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) + bias


def sinusoids(t: int, d: int) -> Tensor:
    """Section 3.5 of Vaswani et al. 2017: (t, d), sines at even and cosines at odd dimensions."""
    angle = torch.arange(t, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    n_heads: int,
    source: int = 0,
    doc_ids: Tensor | None = None,
    norms: Norms | None = None,
    **options: Any,
) -> Tensor:
    """tokens (B, S + T) -> logits (B, T, V); S = source > 0 for the encoder-decoder. norms: those over the batch."""
    o = DEFAULTS | options
    d = weights["embedding"].shape[1]
    d_k = d // n_heads
    of_attention, of_mlp = placements(o)

    def norm(place: str, x: Tensor) -> Tensor:
        if norms is not None:
            return norms[place](x.flatten(0, 1), weights[place], weights[f"{place}.bias"]).view_as(x)
        gain, bias = weights.get(place, 1.0), weights.get(f"{place}.bias", 0.0)
        alpha, shift = weights.get(f"{place}.alpha"), weights.get(f"{place}.shift")
        return normalized(x, gain, bias, alpha, shift, o["norm"], o["norm_eps"])

    def step(block: str, name: str, placement: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        before, after = f"{block}.norm_{name}", f"{block}.norm_post_{name}"
        lamda = weights.get(f"{block}.res_scale" if name == "mlp" else f"{block}.res_scale_{name}", 1.0)
        gamma = weights.get(f"{block}.layer_scale_{name}", 1.0)
        if placement == "pre":
            return lamda * x + gamma * f(norm(before, x))
        if placement == "post":
            return norm(after, lamda * x + gamma * f(x))
        if placement == "peri":
            return lamda * x + gamma * norm(after, f(norm(before, x)))
        assert placement == "reordered"
        return lamda * x + gamma * norm(after, f(x))

    def attention(block: str, x: Tensor, memory: Tensor, visible: Tensor, ids: Tensor | None, turned: bool) -> Tensor:
        def project(name: str, y: Tensor) -> Tensor:
            y = y * weights.get(f"{block}.gain_w{name}", 1.0)
            y = y @ weights[f"{block}.w{name}"].T + weights.get(f"{block}.b{name}", 0.0)
            y = norm(f"{block}.norm_{name}", y) if o["qkv_norm"] else y
            y = split_heads(y, d_k)
            if name == "v":
                return y
            y = norm(f"{block}.{name}_norm", y) if o["qk_norm"] else y
            return rope(y, o["rope_base"], o["rope_layout"], ids) if turned and o["positions"] == "rotary" else y

        def scaled(y: Tensor, where: str) -> Tensor:
            if o["head_scale"] != where:
                return y
            return (y.unflatten(-1, (n_heads, d_k)) * weights[f"{block}.head_scale"][:, None]).flatten(-2)

        q, k, v = project("q", x), project("k", memory), project("v", memory)
        k, v = (y.repeat_interleave(n_heads // k.shape[1], dim=1) for y in (k, v))
        heads = scaled(attend(q, k, v, d_k**-0.5, visible), "before")
        return scaled(heads @ weights[f"{block}.wo"] + weights.get(f"{block}.bo", 0.0), "after")

    def mlp(block: str, x: Tensor) -> Tensor:
        act = ACTIVATIONS[o["activation"]]

        def read(name: str, x: Tensor) -> Tensor:
            return x * weights.get(f"{block}.gain_w_{name}", 1.0)

        hidden = read("u", x) @ weights[f"{block}.w_u"].T + weights.get(f"{block}.b_u", 0.0)
        if o["mlp"] == "gated":
            hidden = hidden * act(read("v", x) @ weights[f"{block}.w_v"].T + weights.get(f"{block}.b_v", 0.0))
        else:
            hidden = act(hidden)
        if o["ffn_norm"] == "norm":
            hidden = norm(f"{block}.norm_ffn", hidden)
        if o["ffn_norm"] == "gain":
            hidden = hidden * weights[f"{block}.norm_ffn"]
        return hidden @ weights[f"{block}.w_down"] + weights.get(f"{block}.b_down", 0.0)

    def embedded(read: Tensor, table: str, ids: Tensor | None) -> Tensor:
        e, share = weights[table][read], o["embedding_gradient"]
        x = share * e + (1 - share) * e.detach() if share != 1 else e
        x = x * math.sqrt(d) if o["scaled_embedding"] else x
        place = torch.arange(read.shape[1]) if ids is None else positions_in(ids)
        if o["positions"] == "sinusoidal":
            return x + sinusoids(read.shape[1], d).to(x.dtype)[place]
        return x + weights["positions"][place] if o["positions"] == "learned" else x

    def stack(
        kind: str, x: Tensor, visible: Tensor, ids: Tensor | None, memory: Tensor | None, across: Tensor | None
    ) -> Tensor:
        for i in range(sum(name.startswith(f"{kind}.") and name.endswith(".w_down") for name in weights)):
            block = f"{kind}.{i}"
            x = step(block, "attn", of_attention, x, lambda y, b=block: attention(b, y, y, visible, ids, True))  # type: ignore[misc]
            if memory is not None:
                assert across is not None
                cross = f"{block}.cross"
                x = step(
                    block,
                    "cross",
                    of_attention,
                    x,
                    lambda y, b=cross: attention(b, y, memory, across, None, False),  # type: ignore[misc]
                )
            x = step(block, "mlp", of_mlp, x, lambda y, b=block: mlp(b, y))  # type: ignore[misc]
        if of_mlp == "post":
            return x
        return norm("norm_encoder" if kind == "encoder" else "norm_final", x)

    output = weights.get("output", weights["embedding"])
    if source:
        seen = masks(torch.zeros_like(tokens) if doc_ids is None else doc_ids, source)
        read = embedded(tokens[:, :source], "source_embedding", None)
        memory = stack("encoder", read, seen[0], None, None, None)
        written = embedded(tokens[:, source:], "embedding", None)
        return stack("layers", written, seen[1], None, memory, seen[2]) @ output.T
    visible = causal(tokens.shape[1], doc_ids)
    return stack("layers", embedded(tokens, "embedding", doc_ids), visible, doc_ids, None, None) @ output.T


def places(table: Shapes) -> list[str]:
    """Where norms with a gain and a bias stand."""
    return [name.removesuffix(".bias") for name in table if name.endswith(".bias")]


def n_params(model: Any) -> int:
    """Of a config of the decoder or encoder-decoder, from the shapes."""
    options = {name: getattr(model, name) for name in DEFAULTS}
    encoder = {"n_encoder_layers": model.n_encoder_layers} if hasattr(model, "n_encoder_layers") else {}
    sizes = {"n_kv_heads": model.n_kv_heads, "d_mlp": model.d_mlp, "context": model.context}
    table = shapes(model.d_model, model.n_layers, model.n_heads, model.vocab_size, **sizes, **encoder, **options)
    return sum(math.prod(shape) for shape in table.values())


def normformer_n_params(model: Any) -> int:
    """Of NormFormer's config with the paper's positions and biases."""
    assert (model.positions, model.bias) == ("sinusoidal", True)
    d, ffn = model.d_model, model.d_mlp
    block = 4 * d * d + 4 * d + 2 * d * ffn + ffn + d + 2 * 2 * d  # matrices, biases and the two norms of Pre-LN
    block += 2 * d * model.post_attn_norm + 2 * ffn * model.ffn_norm + model.n_heads * (model.head_scale != "none")
    block += d * model.res_scale + 3 * 2 * d * model.qkv_norm
    return (2 - model.tied_embeddings) * model.vocab_size * d + model.n_layers * block + 2 * d
