"""Triton kernels of rotary positions with QK-norm and scale; the formulas are in kernels/rotary.py.

A program has a few heads of q, of k, or (backward) of v, and goes through every n-th token. The first members of the
pairs are one tile (HEADS, PAIRS), the second members another, so that a rotation is arithmetic of whole tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ngpt_train.kernels.gpu.launch import programs

EPS = tl.constexpr(1e-12)
PAIRS_PER_WARP, MOST_WARPS = 128, 4  # 8 values per thread, which are 16 bytes in bf16
FORWARD_WARPS_PER_SM, BACKWARD_WARPS_PER_SM = 32, 24  # as many as the registers of their threads allow


@triton.jit
def load_pairs(
    ptr, heads, real, stride, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """First and second members of the pairs, fp32, of the heads at the offsets `heads`; 0 where not `real`."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(ptr + heads[:, None] + columns * stride, mask=real[:, None] & (columns < D), other=0.0)
        first, second = tl.split(tl.reshape(x.to(tl.float32), (HEADS, PAIRS, 2)))
    else:
        columns = tl.arange(0, PAIRS)[None, :]
        mask = real[:, None] & (columns < D // 2)
        first = tl.load(ptr + heads[:, None] + columns * stride, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(ptr + heads[:, None] + (columns + D // 2) * stride, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    ptr, heads, real, first, second,
    D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.reshape(tl.join(first, second), (HEADS, 2 * PAIRS))
        tl.store(ptr + heads[:, None] + columns, x, mask=real[:, None] & (columns < D))
    else:
        columns = tl.arange(0, PAIRS)[None, :]
        mask = real[:, None] & (columns < D // 2)
        tl.store(ptr + heads[:, None] + columns, first, mask=mask)
        tl.store(ptr + heads[:, None] + columns + D // 2, second, mask=mask)


@triton.jit
def load_angles(cos_ptr, sin_ptr, offset, D: tl.constexpr, PAIRS: tl.constexpr):
    columns = tl.arange(0, PAIRS)
    cos = tl.load(cos_ptr + offset + columns, mask=columns < D // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + offset + columns, mask=columns < D // 2, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def forward_heads(
    x_ptr, cos_ptr, sin_ptr, scale_ptr, y_ptr, start, N, T, x_batch, x_token, angle_batch,
    COUNT: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """y = scale * Norm(R x) of HEADS heads from number `start` on, of COUNT heads."""
    heads = (start + tl.arange(0, HEADS)) * D
    real = heads < COUNT * D
    if scale_ptr is not None:
        scale_first, scale_second = load_pairs(scale_ptr, heads, real, 1, D, HEADS, PAIRS, INTERLEAVED)
    for token in range(tl.program_id(1), N, tl.num_programs(1)):
        token = tl.cast(token, tl.int64)
        batch, place = token // T, token % T
        cos, sin = load_angles(cos_ptr, sin_ptr, batch * angle_batch + place * (D // 2), D, PAIRS)
        x = x_ptr + batch * x_batch + place * x_token
        x_first, x_second = load_pairs(x, heads, real, 1, D, HEADS, PAIRS, INTERLEAVED)
        first = x_first * cos - x_second * sin
        second = x_second * cos + x_first * sin
        if NORMALIZED:
            norm = tl.sqrt(tl.sum(first * first + second * second, axis=1))
            r = 1 / tl.where(norm < EPS, EPS, norm)[:, None]  # tl.maximum would drop a NaN
            first *= r
            second *= r
        if scale_ptr is not None:
            first *= scale_first
            second *= scale_second
        store_pairs(y_ptr + token * COUNT * D, heads, real, first, second, D, HEADS, PAIRS, INTERLEAVED)


@triton.jit
def forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr, k_ptr, N, T, qkv_batch, qkv_token, angle_batch,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    Q_BLOCKS: tl.constexpr = (Q + HEADS - 1) // HEADS
    if block < Q_BLOCKS:
        forward_heads(
            qkv_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr, block * HEADS, N, T, qkv_batch, qkv_token, angle_batch,
            Q, D, HEADS, PAIRS, INTERLEAVED, NORMALIZED,
        )  # fmt: skip
    else:
        forward_heads(
            qkv_ptr + Q * D, cos_ptr, sin_ptr, None, k_ptr, (block - Q_BLOCKS) * HEADS,
            N, T, qkv_batch, qkv_token, angle_batch, KV, D, HEADS, PAIRS, INTERLEAVED, NORMALIZED,
        )  # fmt: skip


@triton.jit
def backward_heads(
    dy_ptr, x_ptr, cos_ptr, sin_ptr, scale_ptr, dx_ptr, partial_ptr, start, N, T,
    dy_batch, dy_token, dy_head, dy_column, x_batch, x_token, angle_batch, dx_token,
    COUNT: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """dx of HEADS heads from number `start` on, of COUNT heads, and this program's part of the gradient of scale."""
    head = start + tl.arange(0, HEADS)
    heads = head * D
    real = head < COUNT
    dy_heads = tl.cast(head, tl.int64) * dy_head
    ds_first = tl.zeros((HEADS, PAIRS), tl.float32)
    ds_second = tl.zeros((HEADS, PAIRS), tl.float32)
    if scale_ptr is not None:
        scale_first, scale_second = load_pairs(scale_ptr, heads, real, 1, D, HEADS, PAIRS, INTERLEAVED)
    for token in range(tl.program_id(1), N, tl.num_programs(1)):
        token = tl.cast(token, tl.int64)
        batch, place = token // T, token % T
        cos, sin = load_angles(cos_ptr, sin_ptr, batch * angle_batch + place * (D // 2), D, PAIRS)
        x = x_ptr + batch * x_batch + place * x_token
        dy = dy_ptr + batch * dy_batch + place * dy_token
        x_first, x_second = load_pairs(x, heads, real, 1, D, HEADS, PAIRS, INTERLEAVED)
        e_first, e_second = load_pairs(dy, dy_heads, real, dy_column, D, HEADS, PAIRS, INTERLEAVED)
        n_first = x_first * cos - x_second * sin
        n_second = x_second * cos + x_first * sin
        if NORMALIZED:
            norm = tl.sqrt(tl.sum(n_first * n_first + n_second * n_second, axis=1))
            r = 1 / tl.where(norm < EPS, EPS, norm)[:, None]
            n_first *= r
            n_second *= r
        if scale_ptr is not None:
            ds_first += e_first * n_first
            ds_second += e_second * n_second
            e_first *= scale_first
            e_second *= scale_second
        if NORMALIZED:
            radial = tl.sum(n_first * e_first + n_second * e_second, axis=1)
            radial = tl.where(norm < EPS, 0.0, radial)[:, None]
            e_first = r * (e_first - n_first * radial)
            e_second = r * (e_second - n_second * radial)
        dx_first = e_first * cos + e_second * sin
        dx_second = e_second * cos - e_first * sin
        store_pairs(dx_ptr + token * dx_token, heads, real, dx_first, dx_second, D, HEADS, PAIRS, INTERLEAVED)
    if scale_ptr is not None:
        partial = partial_ptr + tl.program_id(1) * COUNT * D
        store_pairs(partial, heads, real, ds_first, ds_second, D, HEADS, PAIRS, INTERLEAVED)


@triton.jit
def copy_heads(
    dy_ptr, dx_ptr, start, N, T, dy_batch, dy_token, dy_head, dy_column, dx_token,
    COUNT: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    head = start + tl.arange(0, HEADS)
    dy_heads = tl.cast(head, tl.int64) * dy_head
    for token in range(tl.program_id(1), N, tl.num_programs(1)):
        token = tl.cast(token, tl.int64)
        dy = dy_ptr + (token // T) * dy_batch + (token % T) * dy_token
        first, second = load_pairs(dy, dy_heads, head < COUNT, dy_column, D, HEADS, PAIRS, False)
        store_pairs(dx_ptr + token * dx_token, head * D, head < COUNT, first, second, D, HEADS, PAIRS, False)


@triton.jit
def backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, cos_ptr, sin_ptr, scale_ptr, d_qkv_ptr, partial_ptr, N, T,
    dq_batch, dq_token, dq_head, dq_column, dk_batch, dk_token, dk_head, dk_column,
    dv_batch, dv_token, dv_head, dv_column, qkv_batch, qkv_token, angle_batch,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    Q_BLOCKS: tl.constexpr = (Q + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (KV + HEADS - 1) // HEADS
    d_qkv_token: tl.constexpr = (Q + 2 * KV) * D
    if block < Q_BLOCKS:
        backward_heads(
            dq_ptr, qkv_ptr, cos_ptr, sin_ptr, scale_ptr, d_qkv_ptr, partial_ptr, block * HEADS, N, T,
            dq_batch, dq_token, dq_head, dq_column, qkv_batch, qkv_token, angle_batch, d_qkv_token,
            Q, D, HEADS, PAIRS, INTERLEAVED, NORMALIZED,
        )  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        backward_heads(
            dk_ptr, qkv_ptr + Q * D, cos_ptr, sin_ptr, None, d_qkv_ptr + Q * D, None, (block - Q_BLOCKS) * HEADS, N, T,
            dk_batch, dk_token, dk_head, dk_column, qkv_batch, qkv_token, angle_batch, d_qkv_token,
            KV, D, HEADS, PAIRS, INTERLEAVED, NORMALIZED,
        )  # fmt: skip
    else:
        copy_heads(
            dv_ptr, d_qkv_ptr + (Q + KV) * D, (block - Q_BLOCKS - KV_BLOCKS) * HEADS, N, T,
            dv_batch, dv_token, dv_head, dv_column, d_qkv_token, KV, D, HEADS, PAIRS,
        )  # fmt: skip


@torch.library.custom_op("ngpt_train::rotary_forward", mutates_args=())
def rotary_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None,
    n_heads: int, n_kv_heads: int, interleaved: bool, normalized: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q' and k', contiguous; shapes and dtypes as in kernels/rotary.py."""
    B, T = qkv.shape[:2]
    D = 2 * cos.shape[-1]
    qkv, cos, sin = rows_contiguous(qkv), cos.contiguous(), sin.contiguous()
    q = torch.empty((B, T, n_heads, D), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((B, T, n_kv_heads, D), dtype=qkv.dtype, device=qkv.device)
    tiles, num_warps, q_blocks, kv_blocks = blocks_of(n_heads, n_kv_heads, D)
    column_blocks = q_blocks + kv_blocks
    grid = (column_blocks, programs(B * T, column_blocks, FORWARD_WARPS_PER_SM, num_warps, qkv.device))
    forward_kernel[grid](
        qkv, cos, sin, None if scale is None else scale.contiguous(), q, k,
        B * T, T, qkv.stride(0), qkv.stride(1), batch_stride(cos),
        Q=n_heads, KV=n_kv_heads, D=D, **tiles, INTERLEAVED=interleaved, NORMALIZED=normalized, num_warps=num_warps,
    )  # fmt: skip
    return q, k


@rotary_forward.register_fake
def _(qkv, cos, sin, scale, n_heads, n_kv_heads, *_):
    (B, T), D = qkv.shape[:2], 2 * cos.shape[-1]
    return qkv.new_empty((B, T, n_heads, D)), qkv.new_empty((B, T, n_kv_heads, D))


@torch.library.custom_op("ngpt_train::rotary_backward", mutates_args=())
def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None,
    n_heads: int, n_kv_heads: int, interleaved: bool, normalized: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """d_qkv, contiguous, in qkv's dtype, and fp32 d_scale `(n_heads D,)`, which is `(0,)` without scale."""
    B, T = qkv.shape[:2]
    D = 2 * cos.shape[-1]
    qkv, cos, sin = rows_contiguous(qkv), cos.contiguous(), sin.contiguous()
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    tiles, num_warps, q_blocks, kv_blocks = blocks_of(n_heads, n_kv_heads, D)
    column_blocks = q_blocks + 2 * kv_blocks
    sharers = programs(B * T, column_blocks, BACKWARD_WARPS_PER_SM, num_warps, qkv.device)
    partial = torch.empty((sharers, 0 if scale is None else n_heads * D), dtype=torch.float32, device=qkv.device)
    backward_kernel[(column_blocks, sharers)](
        dq, dk, dv, qkv, cos, sin, None if scale is None else scale.contiguous(), d_qkv, partial,
        B * T, T, *dq.stride(), *dk.stride(), *dv.stride(), qkv.stride(0), qkv.stride(1), batch_stride(cos),
        Q=n_heads, KV=n_kv_heads, D=D, **tiles, INTERLEAVED=interleaved, NORMALIZED=normalized, num_warps=num_warps,
    )  # fmt: skip
    return d_qkv, partial.sum(0)


@rotary_backward.register_fake
def _(dq, dk, dv, qkv, cos, sin, scale, *_):
    d_scale = qkv.new_empty((0 if scale is None else scale.shape[0],), dtype=torch.float32)
    return qkv.new_empty(qkv.shape), d_scale


def blocks_of(n_heads: int, n_kv_heads: int, D: int) -> tuple[dict[str, int], int, int, int]:
    """HEADS and PAIRS of a program's tile, warps of a program, number of tiles for q, and number of tiles for k. A
    program has 1, 2 or 4 warps. HEADS is chosen so that the tiles have the fewest rows without a head; among equals the
    largest, because every program reads the angles again."""
    pairs = triton.next_power_of_2(D // 2)
    sizes = [max(1, warps * PAIRS_PER_WARP // pairs) for warps in range(MOST_WARPS, 0, -1) if warps != 3]
    tiles = {heads: (triton.cdiv(n_heads, heads), triton.cdiv(n_kv_heads, heads)) for heads in sizes}
    heads = min(sizes, key=lambda heads: heads * sum(tiles[heads]))
    return {"HEADS": heads, "PAIRS": pairs}, max(1, heads * pairs // PAIRS_PER_WARP), *tiles[heads]


def rows_contiguous(x: Tensor) -> Tensor:
    """x, copied if the columns of a token are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def batch_stride(angles: Tensor) -> int:
    """Elements from a row's angles `(B, T, 1, D/2)` to the next row's; 0 if all rows share the angles `(T, 1, D/2)`."""
    return angles.stride(0) if angles.ndim == 4 else 0
