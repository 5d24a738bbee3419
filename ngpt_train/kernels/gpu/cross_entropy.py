"""Triton kernel of the cross-entropy and its gradient; the formulas are in kernels/cross_entropy.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ngpt_train.core.constants import IGNORED

BLOCK = 4096  # columns that a program reads at once
NUM_WARPS = 8


@triton.jit
def capped(z, soft_cap):
    """c tanh(z / c), where tanh(x) is 2 sigmoid(2 x) - 1; without a cap z."""
    if soft_cap is not None:
        z = soft_cap * (2 * tl.sigmoid(2 * z / soft_cap) - 1)
    return z


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, z_terms_ptr, smoothing_ptr, n_vocab, stride, z_loss, label_smoothing, soft_cap,
    ignored: tl.constexpr, gradient: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program per row. Columns from n_vocab to stride are padding, which the gradient overwrites with 0.

    z_terms_ptr is None where z_loss is 0, smoothing_ptr where label_smoothing is 0, soft_cap where there is none."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may exceed 2^31
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    counts = target != ignored
    inside = (target >= 0) & (target < n_vocab)
    # Read before the first pass over the row, whose reductions synchronise all threads: no thread has overwritten a
    # logit yet.
    target_logit = capped(tl.load(logits_ptr + tl.where(inside, target, 0)).to(tl.float32), soft_cap)

    largest = float("-inf")
    total = 0.0
    sum_z = 0.0
    for start in range(0, n_vocab, block):
        columns = start + tl.arange(0, block)
        # The mask is stride, a multiple of 16 for every n_vocab, so that loads stay wide.
        z = capped(tl.load(logits_ptr + columns, mask=columns < stride, other=0.0).to(tl.float32), soft_cap)
        if smoothing_ptr is not None:
            sum_z += tl.sum(tl.where(columns < n_vocab, z, 0.0), 0)
        z = tl.where(columns < n_vocab, z, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(z - new_largest), 0)
        largest = new_largest

    lse = largest + tl.log(total)
    loss = tl.where(inside, lse - target_logit, float("nan"))
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))
    if z_terms_ptr is not None:
        tl.store(z_terms_ptr + row, tl.where(counts, z_loss * lse * lse, 0.0))
    if smoothing_ptr is not None:
        tl.store(smoothing_ptr + row, tl.where(counts, label_smoothing * (target_logit - sum_z / n_vocab), 0.0))

    if gradient:
        # For a target outside the vocabulary the gradient is NaN, so that the training step is skipped.
        factor = tl.where(inside, 1.0 + 2.0 * z_loss * lse, float("nan"))
        for start in range(0, n_vocab, block):
            columns = start + tl.arange(0, block)
            z = capped(tl.load(logits_ptr + columns, mask=columns < stride, other=0.0).to(tl.float32), soft_cap)
            if smoothing_ptr is not None:
                label = label_smoothing / n_vocab + tl.where(columns == target, 1.0 - label_smoothing, 0.0)
            else:
                label = tl.where(columns == target, 1.0, 0.0)
            dz = factor * tl.exp(z - lse) - label
            if soft_cap is not None:
                dz *= 1 - (z / soft_cap) * (z / soft_cap)
            dz = tl.where((columns < n_vocab) & counts, dz, 0.0)
            tl.store(logits_ptr + columns, dz.to(logits_ptr.dtype.element_ty), mask=columns < stride)


def cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, z_terms: Tensor, smoothing: Tensor,
    z_loss: float, label_smoothing: float, soft_cap: float, gradient: bool,
) -> None:  # fmt: skip
    """Writes the cross-entropies of logits `(N, V)` to losses `(N,)` fp32, z_loss * logsumexp^2 to z_terms and
    label_smoothing * (target's logit - mean logit) to smoothing, fp32 `(N,)` or empty where their option is 0, and, if
    gradient, dz over the logits.

    logits: fp32, bf16 or fp16. Rows may be longer than V; their elements from V on are overwritten too.
    """
    n_rows, n_vocab = logits.shape
    assert logits.stride(1) == targets.stride(0) == losses.stride(0) == z_terms.stride(0) == smoothing.stride(0) == 1
    assert losses.dtype == z_terms.dtype == smoothing.dtype == torch.float32
    block = min(BLOCK, triton.next_power_of_2(n_vocab))
    cross_entropy_kernel[(n_rows,)](
        logits, targets, losses, z_terms if z_loss else None, smoothing if label_smoothing else None,
        n_vocab, logits.stride(0), z_loss, label_smoothing, soft_cap or None,
        ignored=IGNORED, gradient=gradient, block=block, num_warps=NUM_WARPS,
    )  # fmt: skip
