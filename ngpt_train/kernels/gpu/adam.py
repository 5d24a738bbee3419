"""Triton kernel of Adam with the projection; the formulas are in kernels/adam.py.

It reads w, g, m and v once and writes w, m, v and the copy once: a program holds whole rows, one or several short ones,
so it knows a row's length before it stores the row.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of a program, in several rows where one row has fewer


@triton.jit
def minus_expm1(x):
    """1 - exp(x) for x <= 0. Near 0, where the difference would lose all digits, by eight terms of the series."""
    # -x (1 + x/2 (1 + x/3 (1 + ...)))
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0)
    series = 1.0 + x / 5.0 * (1.0 + x / 6.0 * series)
    series = 1.0 + x / 3.0 * (1.0 + x / 4.0 * series)
    series = -x * (1.0 + x / 2.0 * series)
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def adam_rows_kernel(
    weight, gradient, exp_avg, exp_avg_sq, copy, step, grad_scale, found_inf, floor, rows, d, gradient_row,
    gradient_column, lr, beta2, share1, share2, log_beta1, log_beta2, eps, weight_decay,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """copy, grad_scale and found_inf may be None, and floor where rows are free. share1 is 1 - beta1, computed in fp64:
    in fp32, 1 - 0.999 has four correct digits."""
    if found_inf is not None:  # noqa: SIM102 - `and` would load from None
        if tl.load(found_inf) != 0:
            return
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # rows * d may pass 2^31
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < d)
    at = row * d + column
    w = tl.load(weight + at, mask=inside, other=0.0)
    g = tl.load(gradient + row * gradient_row + column * gradient_column, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)

    if grad_scale is not None:
        g = g / tl.load(grad_scale)
    t = tl.load(step)
    m += share1 * (g - m)
    v = beta2 * v + share2 * g * g
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    correction1 = minus_expm1(t * log_beta1)
    correction2 = minus_expm1(t * log_beta2)
    w *= 1.0 - lr * weight_decay
    w -= lr / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    if floor is not None:
        length = tl.sqrt(tl.sum(w * w, axis=1, keep_dims=True))
        w = w / tl.where(length < floor, floor, length)  # tl.maximum would drop a NaN
    tl.store(weight + at, w, mask=inside)
    if copy is not None:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def geometry(d: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: a thread holds at most 16 elements of each tensor."""
    columns = triton.next_power_of_2(d)
    rows = max(1, ELEMENTS // columns)
    return rows, columns, min(16, max(4, columns // 256))


@torch.library.custom_op("ngpt_train::adam_rows_", mutates_args=("weight", "exp_avg", "exp_avg_sq", "copy"))
def adam_rows_(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None, step: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, floor: float | None,
    grad_scale: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    rows, d = weight.shape
    if weight.numel() == 0:  # FSDP2 may leave a rank without a row
        return
    rows_each, columns, num_warps = geometry(d)
    log_beta1, log_beta2 = (math.log(beta) if beta else -math.inf for beta in (beta1, beta2))
    adam_rows_kernel[(triton.cdiv(rows, rows_each),)](
        weight, gradient, exp_avg, exp_avg_sq, copy, step, grad_scale, found_inf, floor, rows, d, *gradient.stride(),
        lr, beta2, 1 - beta1, 1 - beta2, log_beta1, log_beta2, eps, weight_decay,
        ROWS=rows_each, COLUMNS=columns, num_warps=num_warps,
    )  # fmt: skip


adam_rows_.register_fake(lambda *_: None)
