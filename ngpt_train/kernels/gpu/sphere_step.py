"""Triton kernels of the step on the sphere; the formulas are in kernels/sphere_step.py.

Forward reads h and x and writes h': 6 bytes per element in bf16. Backward reads h, x and the two gradients of h',
computes h' again, and writes dh and dx: 12 bytes. Each program sums the gradient of alpha over its rows; torch adds up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ngpt_train.kernels.gpu.launch import as_rows, programs
from ngpt_train.kernels.norm import SHORTEST

WARPS_PER_SM = 24  # of the backward pass, whose threads need 80 registers


@torch.library.custom_op("ngpt_train::sphere_step_forward", mutates_args=())
def sphere_step_forward(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h, x `(..., D)`, alpha `(D,)` -> h' `(..., D)` in h's dtype; 1 / ||x|| and 1 / ||u|| `(N,)` in fp32."""
    h_rows, x_rows = as_rows(h), as_rows(x)
    N, D = h_rows.shape
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    r_x, r_u = (torch.empty(N, dtype=torch.float32, device=h.device) for _ in range(2))
    block = triton.next_power_of_2(D)
    _forward[(N,)](
        h_rows, x_rows, alpha.contiguous(), out, r_x, r_u, h_rows.stride(0), x_rows.stride(0), D,
        SHORTEST=SHORTEST, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out, r_x, r_u


@sphere_step_forward.register_fake
def _(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r_x, r_u = (h.new_empty(h.numel() // h.shape[-1], dtype=torch.float32) for _ in range(2))
    return h.new_empty(h.shape), r_x, r_u


@torch.library.custom_op("ngpt_train::sphere_step_backward", mutates_args=())
def sphere_step_backward(
    g: Tensor, g_too: Tensor | None, h: Tensor, x: Tensor, alpha: Tensor, r_x: Tensor, r_u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh and dx, in the shapes and dtypes of h and x, and dalpha `(D,)` in fp32. g + g_too is the gradient of h' (see
    HiddenState); g_too None is 0. r_x, r_u: from the forward pass."""
    h_rows, x_rows, g_rows = as_rows(h), as_rows(x), as_rows(g)
    too_rows = g_rows if g_too is None else as_rows(g_too)
    N, D = h_rows.shape
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(D)
    n_programs = programs(N, 1, WARPS_PER_SM, warps(block), h.device)
    dalpha = torch.empty(n_programs, D, dtype=torch.float32, device=h.device)
    _backward[(n_programs,)](
        g_rows, too_rows, h_rows, x_rows, alpha.contiguous(), r_x, r_u, dh, dx, dalpha,
        g_rows.stride(0), too_rows.stride(0), h_rows.stride(0), x_rows.stride(0), N, D, n_programs,
        TWO=g_too is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return dh, dx, dalpha.sum(0)


@sphere_step_backward.register_fake
def _(g, g_too, h, x, alpha, r_x, r_u):
    return h.new_empty(h.shape), x.new_empty(x.shape), alpha.new_empty(alpha.shape, dtype=torch.float32)


def warps(block: int) -> int:
    """Warps of a program that holds a row of `block` elements: 8 elements per thread, which are 16 bytes in bf16."""
    return max(1, min(16, block // 256))


@triton.jit
def _forward(
    h_ptr, x_ptr, alpha_ptr, out_ptr, r_x_ptr, r_u_ptr, h_stride, x_stride, D,
    SHORTEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    h = tl.load(h_ptr + row * h_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr + column, mask=inside, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(x * x))
    r_x = 1 / tl.where(length < SHORTEST, SHORTEST, length)  # tl.maximum would drop a NaN
    u = h + alpha * (x * r_x - h)
    length = tl.sqrt(tl.sum(u * u))
    r_u = 1 / tl.where(length < SHORTEST, SHORTEST, length)
    tl.store(out_ptr + row * D + column, u * r_u, mask=inside)
    tl.store(r_x_ptr + row, r_x)
    tl.store(r_u_ptr + row, r_u)


@triton.jit
def _backward(
    g_ptr, too_ptr, h_ptr, x_ptr, alpha_ptr, r_x_ptr, r_u_ptr, dh_ptr, dx_ptr, dalpha_ptr,
    g_stride, too_stride, h_stride, x_stride, N, D, n_programs,
    TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    alpha = tl.load(alpha_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dalpha = tl.zeros([BLOCK], tl.float32)
    for number in range(program, N, n_programs):
        row = tl.cast(number, tl.int64)
        h = tl.load(h_ptr + row * h_stride + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            g += tl.load(too_ptr + row * too_stride + column, mask=inside, other=0.0).to(tl.float32)
        r_x = tl.load(r_x_ptr + row)
        r_u = tl.load(r_u_ptr + row)
        x_hat = x * r_x
        away = x_hat - h
        out = (h + alpha * away) * r_u
        du = (g - out * tl.sum(out * g)) * r_u
        dalpha += du * away
        dx_hat = alpha * du
        tl.store(dh_ptr + row * D + column, du - dx_hat, mask=inside)
        tl.store(dx_ptr + row * D + column, (dx_hat - x_hat * tl.sum(x_hat * dx_hat)) * r_x, mask=inside)
    tl.store(dalpha_ptr + program.to(tl.int64) * D + column, dalpha, mask=inside)
