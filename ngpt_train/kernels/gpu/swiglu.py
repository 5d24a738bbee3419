"""Triton kernels of SwiGLU with scale vectors; the formulas are in kernels/swiglu.py.

A program has one block of columns. It reads s_u and s_v there once, and then goes through every n-th row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ngpt_train.kernels.gpu.launch import as_rows, programs

BLOCK = 1024  # columns of a program: 8 per thread, which are 16 bytes in bf16
COLUMNS_PER_WARP = 256
FORWARD_WARPS_PER_SM, BACKWARD_WARPS_PER_SM = 32, 24  # as many as the registers of their threads allow


@triton.jit
def forward_kernel(uv_ptr, s_u_ptr, s_v_ptr, y_ptr, N, M, uv_stride, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < M
    if s_u_ptr is not None:
        s_u = tl.load(s_u_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        s_v = tl.load(s_v_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(1), N, tl.num_programs(1)):
        u_ptr = uv_ptr + tl.cast(row, tl.int64) * uv_stride
        u = tl.load(u_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(u_ptr + M + columns, mask=inside, other=0.0).to(tl.float32)
        if s_u_ptr is not None:
            u *= s_u
            v *= s_v
        tl.store(y_ptr + tl.cast(row, tl.int64) * M + columns, u * v * tl.sigmoid(v), mask=inside)


@triton.jit
def backward_kernel(
    dy_ptr, uv_ptr, s_u_ptr, s_v_ptr, d_uv_ptr, partial_ptr, N, M, dy_stride, uv_stride, BLOCK: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < M
    ds_u = tl.zeros((BLOCK,), tl.float32)
    ds_v = tl.zeros((BLOCK,), tl.float32)
    if s_u_ptr is not None:
        s_u = tl.load(s_u_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        s_v = tl.load(s_v_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(1), N, tl.num_programs(1)):
        u_ptr = uv_ptr + tl.cast(row, tl.int64) * uv_stride
        du_ptr = d_uv_ptr + tl.cast(row, tl.int64) * 2 * M
        g = tl.load(dy_ptr + tl.cast(row, tl.int64) * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(u_ptr + M + columns, mask=inside, other=0.0).to(tl.float32)
        x = v
        if s_u_ptr is not None:
            x = s_v * v
        sigma = tl.sigmoid(x)
        silu = x * sigma
        du = g * silu  # still without the factor s_u, as dx
        dx = g * u * (sigma + silu * (1 - sigma))
        if s_u_ptr is not None:
            ds_u += du * u
            du *= s_u
            dx *= s_u
            ds_v += dx * v
            dx *= s_v
        tl.store(du_ptr + columns, du, mask=inside)
        tl.store(du_ptr + M + columns, dx, mask=inside)
    if s_u_ptr is not None:
        partial_ptr += tl.program_id(1) * 2 * M
        tl.store(partial_ptr + columns, ds_u, mask=inside)
        tl.store(partial_ptr + M + columns, ds_v, mask=inside)


@torch.library.custom_op("ngpt_train::swiglu_forward", mutates_args=())
def swiglu_forward(uv: Tensor, s_u: Tensor | None, s_v: Tensor | None) -> Tensor:
    """uv `(..., 2 m)`, s_u and s_v `(m,)` or None -> y `(..., m)` in uv's dtype."""
    rows = as_rows(uv)  # (N, 2 m)
    N, M = rows.shape[0], rows.shape[1] // 2
    y = torch.empty((*uv.shape[:-1], M), dtype=uv.dtype, device=uv.device)
    block, num_warps, column_blocks = blocks_of(M)
    grid = (column_blocks, programs(N, column_blocks, FORWARD_WARPS_PER_SM, num_warps, uv.device))
    s_u, s_v = contiguous(s_u), contiguous(s_v)
    forward_kernel[grid](rows, s_u, s_v, y, N, M, rows.stride(0), BLOCK=block, num_warps=num_warps)
    return y


@swiglu_forward.register_fake
def _(uv: Tensor, s_u: Tensor | None, s_v: Tensor | None) -> Tensor:
    return uv.new_empty((*uv.shape[:-1], uv.shape[-1] // 2))


@torch.library.custom_op("ngpt_train::swiglu_backward", mutates_args=())
def swiglu_backward(dy: Tensor, uv: Tensor, s_u: Tensor | None, s_v: Tensor | None) -> tuple[Tensor, Tensor]:
    """d_uv `(..., 2 m)` in uv's dtype, and [ds_u, ds_v] `(2, m)` in fp32, which is `(2, 0)` without scale vectors."""
    rows, dy_rows = as_rows(uv), as_rows(dy)
    N, M = dy_rows.shape
    d_uv = torch.empty(uv.shape, dtype=uv.dtype, device=uv.device)
    block, num_warps, column_blocks = blocks_of(M)
    sharers = programs(N, column_blocks, BACKWARD_WARPS_PER_SM, num_warps, uv.device)
    # (programs, 2, m)
    partial = torch.empty((sharers, 2, 0 if s_u is None else M), dtype=torch.float32, device=uv.device)
    s_u, s_v = contiguous(s_u), contiguous(s_v)
    backward_kernel[(column_blocks, sharers)](
        dy_rows, rows, s_u, s_v, d_uv, partial, N, M, dy_rows.stride(0), rows.stride(0), BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip
    return d_uv, partial.sum(0)


@swiglu_backward.register_fake
def _(dy: Tensor, uv: Tensor, s_u: Tensor | None, s_v: Tensor | None) -> tuple[Tensor, Tensor]:
    d_s = uv.new_empty((2, 0 if s_u is None else dy.shape[-1]), dtype=torch.float32)
    return uv.new_empty(uv.shape), d_s


def blocks_of(M: int) -> tuple[int, int, int]:
    """Columns of a program's block, warps of the program, and the number of blocks that cover M columns."""
    block = min(BLOCK, max(32, triton.next_power_of_2(M)))
    return block, max(1, block // COLUMNS_PER_WARP), triton.cdiv(M, block)


def contiguous(vector: Tensor | None) -> Tensor | None:
    """The vector, copied if it is not contiguous: a scalar scale comes expanded, with stride 0."""
    return None if vector is None else vector.contiguous()
