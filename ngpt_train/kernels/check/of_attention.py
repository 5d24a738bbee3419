"""Attention beside softmax(scale q k^T) v written out, on a few rows and heads: all would not fit into memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngpt_train.kernels import attention
from ngpt_train.kernels.attention import Mask, Packed
from ngpt_train.kernels.check.calls import Call
from ngpt_train.kernels.check.deviation import MATRIX_TOLERANCE, Error, error_of
from ngpt_train.kernels.check.draw import Draw

ROOM = 64  # boundaries of documents for each row, most of them of empty ones, as in training
# Kernels round inputs, outputs, probabilities and the gradients of probabilities to the activations' dtype.
ROUNDINGS = 4
POISONED = 2**28  # bytes of memory that are NaN before the kernel asks for new memory


@dataclass(frozen=True)
class AttentionCase:
    """A call of attention. All of it runs; the first and the last head of the first and the last row are compared."""

    call: Call
    draw: Draw

    def errors(self) -> dict[str, Error]:
        """The errors of the output and of the gradients of q, k and v, by name."""
        call, draw = self.call, self.draw
        B, T, H, D = call.shape
        S, H_kv = call["keys"]
        dtype, scale = getattr(torch, call.dtype), call["scale"]
        # nGPT's unit vectors have the scale sqrt(D), others 1/sqrt(D): scores of about 1 for both.
        size = (scale * D**0.5) ** -0.5
        q, k, v = (
            (width * draw.normal(B, length, heads, D)).to(dtype).requires_grad_()
            for width, length, heads in ((size, T, H), (size, S, H_kv), (1.0, S, H_kv))
        )
        dy = draw.normal(B, T, H, D).to(dtype)
        mask, visible = self.masks()
        if draw.device.type == "cuda":
            # Deterministic mode, which would fill new memory with NaN, lets torch choose another kernel.
            del_soon = torch.full((POISONED // 4,), float("nan"), device=draw.device)
            del del_soon
        y = attention.attention(q, k, v, scale, call["causal"], mask)
        ours = [y, *torch.autograd.grad(y, (q, k, v), dy)]

        higher = torch.float64 if dtype == torch.float32 else torch.float32
        group = H // H_kv
        found: dict[str, list[Error]] = {name: [] for name in ("output", "gradient q", "gradient k", "gradient v")}
        for row in sorted({0, B - 1}):
            for head in sorted({0, H_kv - 1}):
                of_q, of_kv = slice(head * group, (head + 1) * group), slice(head, head + 1)
                heads = (of_q, of_q, of_kv, of_kv)
                parts = [x[row : row + 1, :, h].detach().to(higher) for x, h in ((q, of_q), (k, of_kv), (v, of_kv))]
                one_q, one_k, one_v = (part.requires_grad_() for part in parts)
                out = attention.written_out(one_q, one_k, one_v, scale, visible[row % len(visible)])
                exact = [out, *torch.autograd.grad(out, parts, dy[row : row + 1, :, of_q].to(higher))]
                for errors, one, of, expected in zip(found.values(), ours, heads, exact, strict=True):
                    errors.append(error_of(one[row : row + 1, :, of], expected, ROUNDINGS * MATRIX_TOLERANCE[dtype]))
        # An error that is not small comes first: NaN is not larger than a number.
        return {name: max(errors, key=lambda e: (not e.is_small, e.relative)) for name, errors in found.items()}

    def masks(self) -> tuple[Mask, Tensor]:
        """A mask of the call's kind and shape, and the same mask as a boolean `(B or 1, 1, T or 1, S)`."""
        call, draw = self.call, self.draw
        (B, T, _, D), S = call.shape, call["keys"][0]
        causal = torch.ones(T, S, dtype=torch.bool, device=draw.device)
        causal = (causal.tril() if call["causal"] else causal)[None, None]
        if call["mask"] is None:
            return None, causal
        if call.kernel == "attention":
            visible = draw.uniform(*call["mask"]) < 0.9
            visible[..., 0] = True  # every query sees a key
            return visible, visible
        ends = [T // 3, T // 2, T] if T > 3 else [T]
        place = torch.arange(T, device=draw.device)
        doc_ids = torch.bucketize(place, torch.tensor(ends, device=draw.device), right=True)
        visible = causal & (doc_ids[:, None] == doc_ids)
        kernel = attention.varlen_kernel(draw.device, D, getattr(torch, call.dtype))
        if kernel is not None:
            starts = torch.tensor([row * T + start for row in range(B) for start in (0, *ends[:-1])])
            boundaries = torch.full((B * min(T, ROOM) + 1,), B * T, dtype=torch.int32)
            boundaries[: len(starts)] = starts
            return Packed(kernel, boundaries.to(draw.device), longest=T), visible
        if attention.wants_blocks():

            def seen(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
                return (s <= t) & (doc_ids[t] == doc_ids[s])

            return attention.blocks(seen, B, T, draw.device), visible
        return visible.expand(B, 1, T, T), visible
