"""The output embedding and the cross-entropy as one operation that never holds all logits.

For a hidden state h, the output embedding W `(V, d)`, nGPT's scale s_z `(V,)` and the target t (paper, eq. 3):

    z = s_z W h        lse = log(sum_v exp(z_v))        loss = lse - z_t + c lse^2

where c is `z_loss`, whose term is summed apart: it trains, and what is reported stays the cross-entropy. s_z multiplies
rows of W, so it is folded into them: W' = diag(s_z) W in fp32, z = W' h, and the logits need no pass of their own for
it. Gradients of the summed loss, with p = softmax(z) and e_t the unit vector of t:

    dz = (1 + 2 c lse) p - e_t        dh = W'^T dz        dW' = sum over tokens of dz h^T
    dW = diag(s_z) dW'                ds_z = rowsum(dW' * W)

The loss is a sum, so its gradients are known, up to the factor that comes from above, as soon as it is. Tokens
therefore go in chunks: logits, losses, dz written over the logits, then dh and the chunk's share of dW'; after which
the chunk's logits are forgotten. Backward only multiplies.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels.dispatch import runs_on_triton
from ngpt_train.kernels.norm import wide
from ngpt_train.kernels.operation import operation

GPU_ROWS = 4096  # tokens in a chunk: large enough for efficient products, 256 MiB of bf16 logits at V = 32k
CPU_ROWS = 512  # measured: less costs the products more, more costs memory and gains nothing
ALIGNMENT = 64  # rows of a GPU's logits start at multiples of it: aligned loads and products for any V


@operation(None)
def linear_cross_entropy(
    h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None = None, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, cross_entropy, z_term): sums, in nats, over the targets of the logits z = scale * (matrix h).

    h: `(..., d)` in the dtype of the products; fp32, bf16, fp16 or fp64.
    matrix: `(V, d)`, the output embedding as stored; a copy is cast to h's dtype after scaling.
    targets: `(...)` int64 in [0, V), or IGNORED where a token does not count.
    scale: `(V,)`; None is 1.
    z_loss: adds z_loss * logsumexp(logits)^2 to the loss for every target that counts.

    They are 0-dim, in fp32, fp64 for fp64 h. loss = cross_entropy + z_term, which have no gradients; z_term is None
    where z_loss is 0. Gradients have the dtype and shape of what they belong to; sums over tokens are in fp32 at least.
    Never waits for the device. A target outside the vocabulary raises as torch's gather does; in the Triton kernel,
    which cannot raise, it makes the loss and all gradients that it reaches NaN. Raises ValueError where shapes do not
    fit.
    """
    z = wide(h) @ matrix.to(wide(h).dtype).t()  # (..., V)
    if scale is not None:
        z = z * scale  # eq. 3 of nGPT
    counts = targets != IGNORED
    lse = z.logsumexp(-1)
    z_t = z.gather(-1, targets.where(counts, 0)[..., None]).squeeze(-1)
    cross_entropy = (lse - z_t).where(counts, 0).sum()
    z_term = (z_loss * lse.square()).where(counts, 0).sum()
    return cross_entropy + z_term, cross_entropy.detach(), z_term.detach() if z_loss else None


@linear_cross_entropy.check
def check(h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None = None, z_loss: float = 0.0) -> None:
    if h.shape[:-1] != targets.shape or h.shape[-1:] != matrix.shape[1:]:
        raise ValueError(f"h {tuple(h.shape)}, matrix {tuple(matrix.shape)}, targets {tuple(targets.shape)} do not fit")
    if scale is not None and scale.shape != matrix.shape[:1]:
        raise ValueError(f"scale {tuple(scale.shape)} and matrix {tuple(matrix.shape)} do not fit")


@linear_cross_entropy.twin
def in_chunks(
    _: bool, h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None = None, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    loss, *parts = _LinearCrossEntropy.apply(h, matrix, targets, scale, z_loss, torch.is_grad_enabled())
    cross_entropy, z_term = parts or (loss.detach(), None)
    return loss, cross_entropy, z_term


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        matrix: Tensor,
        targets: Tensor,
        scale: Tensor | None,
        z_loss: float,
        grad_enabled: bool,
    ) -> tuple[Tensor, ...]:
        # grad_enabled comes from outside, because here it is always off; needs_input_grad does not ask for it.
        need_h, need_matrix, _, need_scale, *_ = (grad_enabled and needed for needed in ctx.needs_input_grad)
        cross_entropy, z_term, dh, dmatrix, dscale = linear_cross_entropy_forward(
            h, matrix, targets, scale, z_loss, need_h, need_matrix, need_scale
        )
        ctx.save_for_backward(dh, dmatrix, dscale)
        if z_loss == 0:
            return (cross_entropy,)
        ctx.mark_non_differentiable(cross_entropy, z_term)
        return cross_entropy + z_term, cross_entropy, z_term

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # Out of place, so that a second backward of a retained graph is right too.
        need_h, need_matrix, _, need_scale, *_ = ctx.needs_input_grad
        dh, dmatrix, dscale = ctx.saved_tensors
        return (
            dh * dloss if need_h else None,
            dmatrix * dloss if need_matrix else None,
            None,
            dscale * dloss if need_scale else None,
            None,
            None,
        )


@torch.library.custom_op("ngpt_train::linear_cross_entropy_forward", mutates_args=())
def linear_cross_entropy_forward(
    h: Tensor,
    matrix: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    z_loss: float,
    need_h: bool,
    need_matrix: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The summed cross-entropy, the summed term of the z-loss, and the gradients of both together by h, matrix and
    scale; an empty tensor for what is not needed."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    on_triton = runs_on_triton("linear_cross_entropy", h)  # asked here: a compiled graph does not look inside
    weight = (matrix if scale is None else scale[:, None] * matrix).to(h.dtype)  # W', (V, d)
    rows_of_h, rows_of_targets = h.reshape(-1, h.shape[-1]), targets.reshape(-1).contiguous()  # (N, d), (N,)
    n_rows, n_vocab = len(rows_of_h), len(weight)

    losses = h.new_empty(n_rows, dtype=dtype)
    z_terms = h.new_empty(n_rows if z_loss else 0, dtype=dtype)
    dh = torch.empty_like(rows_of_h, memory_format=torch.contiguous_format) if need_h else h.new_empty(0)
    sum_needed = need_matrix or need_scale
    new = torch.empty_like if n_rows else torch.zeros_like
    dweight = new(weight, dtype=dtype, memory_format=torch.contiguous_format) if sum_needed else None

    chunk = GPU_ROWS if h.is_cuda else CPU_ROWS
    width = -(-n_vocab // ALIGNMENT) * ALIGNMENT if on_triton else n_vocab
    buffer = h.new_empty(min(chunk, n_rows), width)
    for start in range(0, n_rows, chunk):
        here = slice(start, min(start + chunk, n_rows))
        x = rows_of_h[here]
        logits = buffer[: len(x), :n_vocab]
        torch.mm(x, weight.t(), out=logits)
        if on_triton:
            from ngpt_train.kernels.gpu.cross_entropy import cross_entropy_
        else:
            cross_entropy_ = _cross_entropy_
        gradient = need_h or sum_needed
        cross_entropy_(logits, rows_of_targets[here], losses[here], z_terms[here], z_loss, gradient)
        if need_h:
            torch.mm(logits, weight, out=dh[here])
        if dweight is not None:
            _add_product_(dweight, logits.t(), x, keep=int(start > 0))
    del buffer  # what follows takes memory of its own

    dmatrix = dscale = None
    if dweight is not None and need_scale:
        assert scale is not None
        dscale = (dweight * matrix).sum(1).to(scale.dtype)
    if dweight is not None and need_matrix:
        dmatrix = (dweight if scale is None else dweight.mul_(scale[:, None])).to(matrix.dtype)
    return (
        losses.sum(),  # one sum at the end: the size of the chunks does not change its order
        z_terms.sum() if z_loss else z_terms,
        dh.view(h.shape) if need_h else dh,
        h.new_empty(0) if dmatrix is None else dmatrix,
        h.new_empty(0) if dscale is None else dscale,
    )


@linear_cross_entropy_forward.register_fake
def _(
    h: Tensor,
    matrix: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    z_loss: float,
    need_h: bool,
    need_matrix: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(h.dtype, torch.float32)
    return (
        h.new_empty((), dtype=dtype),
        h.new_empty(() if z_loss else 0, dtype=dtype),
        h.new_empty(h.shape if need_h else 0),
        matrix.new_empty(matrix.shape) if need_matrix else h.new_empty(0),
        scale.new_empty(scale.shape) if need_scale and scale is not None else h.new_empty(0),
    )


def _cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, z_terms: Tensor, z_loss: float, gradient: bool
) -> None:
    """Writes the cross-entropies of logits `(N, V)` to losses `(N,)`, c lse^2 to z_terms, `(N,)` or empty where c is 0,
    and dz over the logits if gradient; else they are lost."""
    counts = (targets != IGNORED)[:, None]
    index = targets[:, None].where(counts, 0)  # (N, 1)
    z = logits.to(losses.dtype)  # for fp32 and fp64 the logits themselves
    target_logits = z.gather(1, index)
    largest = z.amax(1, keepdim=True)
    total = z.sub_(largest).exp_().sum(1, keepdim=True)
    lse = largest + total.log()
    losses.copy_((lse - target_logits).where(counts, 0).squeeze(1))
    if z_loss:
        z_terms.copy_((z_loss * lse.square()).where(counts, 0).squeeze(1))
    if gradient:
        z.mul_(((1 + 2 * z_loss * lse) / total).where(counts, 0))
        z.scatter_(1, index, z.gather(1, index) - counts.to(z.dtype))
        logits.copy_(z)


def _add_product_(total: Tensor, a: Tensor, b: Tensor, keep: int) -> None:
    """total <- keep total + a b, with the sum in total's dtype; where keep is 0, what total held is not read."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=keep)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=keep, out_dtype=total.dtype, out=total)
    elif keep:  # CPUs have no product of another dtype than its factors
        total.add_(torch.mm(a, b))
    else:
        total.copy_(torch.mm(a, b))
