"""The two models of NVIDIA's public nGPT code (github.com/NVIDIA/ngpt, model.py), by its equations and its names.

`rope="theirs"` is what that code does to q and k, which is no rotation; `rope="true"` turns the pairs (2i, 2i + 1).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference.attention import attention, silu, split_heads
from tests.reference.attention import rope as true_rope


def shapes(arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, V = arguments["n_embd"], arguments["vocab_size"]
    table: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (V, d), "lm_head.weight": (V, d)}
    for i in range(arguments["n_layer"]):
        block: dict[str, tuple[int, ...]] = {f"{name}.weight": (d, d) for name in ("key", "query", "value")}
        block |= {"att_c_proj.weight": (d, d), "c_fc.weight": (8 * d, d), "mlp_c_proj.weight": (d, 4 * d)}
        if arguments["use_nGPT"]:
            block |= {"attn_alpha": (d,), "mlp_alpha": (d,), "sqk": (d,), "suv": (8 * d,)}
        else:
            block |= {"rmsnorm_att.weight": (d,), "rmsnorm_mlp.weight": (d,)}
        table |= {f"transformer.h.{i}.{name}": shape for name, shape in block.items()}
    return table | ({"sz": (V,)} if arguments["use_nGPT"] else {"rmsnorm_f.weight": (d,)})


def random_state(arguments: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """fp64: every vector away from its start, alphas of both signs, and with use_nGPT every row at length 1."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(arguments).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 2 and arguments["use_nGPT"]:
            along = 0 if name.endswith("c_proj.weight") else 1
            state[name] = noise / noise.norm(dim=along, keepdim=True)
        elif len(shape) == 2:
            state[name] = noise * shape[-1] ** -0.5
        elif name.endswith("alpha"):
            state[name] = 5 * arguments["base_scale"] * noise
        elif name == "sz":
            state[name] = arguments["base_scale"] * (8 + noise)
        else:
            state[name] = (arguments["base_scale"] if name.endswith("sqk") else 1.0) * (1 + 0.3 * noise)
    return state


def their_rope(x: Tensor) -> Tensor:
    """x (B, H, T, d_k): each pair is swapped, negated once and multiplied, and nothing is added."""
    t, d_k = x.shape[-2:]
    table = torch.empty(t, d_k, dtype=x.dtype)
    for i in range(d_k // 2):
        angle = torch.arange(t, dtype=x.dtype) * 10000.0 ** (-2 * i / d_k)
        table[:, 2 * i], table[:, 2 * i + 1] = angle.sin(), angle.cos()
    out = torch.empty_like(x)
    for i in range(d_k // 2):
        out[..., 2 * i] = -x[..., 2 * i + 1] * table[:, d_k // 2 + i]
        out[..., 2 * i + 1] = x[..., 2 * i] * table[:, i]
    return out


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True))


def forward(state: Mapping[str, Tensor], arguments: Mapping[str, Any], tokens: Tensor, rope: str) -> Tensor:
    """tokens (B, T) -> logits (B, T, V)."""
    d, heads, scale = arguments["n_embd"], arguments["n_head"], arguments["base_scale"]
    d_k, is_ngpt = d // heads, arguments["use_nGPT"] == 1
    turn = {"true": lambda x: true_rope(x, 10000.0, "interleaved"), "theirs": their_rope}[rope]

    def rms(x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * gain

    def step(h: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
        return unit(unit(h) + (alpha * (0.05 / scale)).abs() * (unit(y) - unit(h)))

    h = state["transformer.wte.weight"][tokens]
    for i in range(arguments["n_layer"]):
        w = {name.removeprefix(f"transformer.h.{i}."): x for name, x in state.items()}
        x = h if is_ngpt else rms(h, w["rmsnorm_att.weight"])
        q, k, v = (split_heads(x @ w[f"{name}.weight"].T, d_k) for name in ("query", "key", "value"))
        q, k = turn(q), turn(k)
        if is_ngpt:
            sqk = (w["sqk"] / scale).view(heads, 1, d_k)
            q, k = sqk * unit(q), sqk * unit(k)
        y = attention(q, k, v, d_k**0.5 if is_ngpt else d_k**-0.5, None) @ w["att_c_proj.weight"].T
        h = step(h, y, w["attn_alpha"]) if is_ngpt else h + y
        uv = (h if is_ngpt else rms(h, w["rmsnorm_mlp.weight"])) @ w["c_fc.weight"].T
        u, v = (uv * w["suv"] * d**0.5 if is_ngpt else uv).chunk(2, dim=-1)
        y = (u * silu(v)) @ w["mlp_c_proj.weight"].T
        h = step(h, y, w["mlp_alpha"]) if is_ngpt else h + y
    if is_ngpt:
        return h @ state["lm_head.weight"].T * (state["sz"] / scale)
    return rms(h, state["rmsnorm_f.weight"]) @ state["lm_head.weight"].T
