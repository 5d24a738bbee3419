"""GPT's logits in the order of operations of transformers' LlamaForCausalLM and Qwen3ForCausalLM, in fp32 on a CPU.

Our own forward pass computes RoPE's angles in fp64 and several matrices in one product; transformers computes the
angles in fp32 and one product for each matrix. Their roundings differ, and could hide a small mistake of an export.
This function takes our weights and rounds as transformers does, so its difference to an exported model is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.interop.layouts.llama import to_half
from ngpt_train.models.gpt.keys import GPTConfig


def logits(weights: Mapping[str, Tensor], config: GPTConfig, tokens: Tensor) -> Tensor:
    """weights: by canonical name, fp32; tokens `(B, T)` -> `(B, T, V)`. It copies one layer at a time."""
    n_kv_heads, d_head = config.n_kv_heads or config.n_heads, config.d_model // config.n_heads
    cos, sin = angles(tokens.shape[1], d_head, config.rope_base)
    act = F.silu if config.activation == "silu" else F.gelu

    def in_pairs(rows: Tensor) -> Tensor:
        return to_half(rows, d_head) if config.rope_layout == "interleaved" else rows

    def norm(x: Tensor, gain: str) -> Tensor:
        return weights[gain] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps))

    h = F.embedding(tokens, weights["embedding"])  # (B, T, d_model)
    for layer in (f"layers.{i}" for i in range(config.n_layers)):

        def heads(x: Tensor, name: str, layer: str = layer) -> Tensor:
            w = weights[f"{layer}.w{name}"]
            x = F.linear(x, in_pairs(w) if name != "v" else w).unflatten(-1, (-1, d_head))
            if config.qk_norm and name != "v":
                gain = in_pairs(weights[f"{layer}.{name}_norm"])
                x = gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps))
            x = x.transpose(1, 2)  # (B, H, T, D)
            return x if name == "v" else x * cos + torch.cat((-x[..., d_head // 2 :], x[..., : d_head // 2]), -1) * sin

        x = norm(h, f"{layer}.norm_attn")
        q, k, v = (heads(x, name) for name in "qkv")
        grouped = n_kv_heads < config.n_heads
        x = F.scaled_dot_product_attention(q, k, v, is_causal=len(x[0]) > 1, scale=d_head**-0.5, enable_gqa=grouped)
        h = h + F.linear(x.transpose(1, 2).flatten(2), weights[f"{layer}.wo"].T.contiguous())
        x = norm(h, f"{layer}.norm_mlp")
        hidden = act(F.linear(x, weights[f"{layer}.w_v"])) * F.linear(x, weights[f"{layer}.w_u"])
        h = h + F.linear(hidden, weights[f"{layer}.w_down"].T.contiguous())
    return F.linear(norm(h, "norm_final"), weights["embedding" if config.tied_embeddings else "output"])


def angles(length: int, d_head: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin `(T, d_head)` of the angles in fp32; the second half repeats the first."""
    frequencies = 1.0 / (base ** (torch.arange(0, d_head, 2, dtype=torch.float) / d_head))
    turned = torch.arange(length)[:, None].float() * frequencies
    both = torch.cat((turned, turned), -1)
    return both.cos(), both.sin()
