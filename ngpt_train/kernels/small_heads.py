"""Attention of small heads in bf16 on a CPU: torch's kernels, the backward one in fp32.

With heads of fewer than 64 numbers torch's backward kernel for CPUs takes up to 3.5 times as long in bf16 as in fp32,
and rounds more (docs/benchmarks/step.md). The forward kernel in bf16 is the faster one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGE_HEAD = 64  # of this size and more, fp32 is faster in short rows alone


def is_faster_in_fp32(q: Tensor, k: Tensor) -> bool:
    """Whether `attention_of_small_heads` takes q and k, `(B, H, T, D)`, and a backward pass will follow."""
    is_small = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-1] < LARGE_HEAD
    return is_small and q.shape[1] == k.shape[1] and torch.is_grad_enabled() and q.requires_grad


def attention_of_small_heads(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(scale q k^T) v: q `(B, H, T, D)`, k and v `(B, H, S, D)` in bf16 -> `(B, H, T, D)`.

    As F.scaled_dot_product_attention, but gradients are computed in fp32 before they are rounded to bf16.
    """
    y: Tensor = _SmallHeads.apply(q, k, v, scale, causal)
    return y


class _SmallHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        # lse: log of the sum of exp(scale q k^T), `(B, H, T)` in fp32. 0.0: no dropout.
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse = ctx.saved_tensors
        q, k, v, y = (x.float() for x in saved)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy.float(), q, k, v, y, lse, 0.0, ctx.causal, scale=ctx.scale
        )
        return *(gradient.to(dy.dtype) for gradient in gradients), None, None
