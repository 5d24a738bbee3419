"""The product with the output embedding and the cross-entropy as one operation, which never holds all logits.

For a hidden state h `(d,)`, the output embedding W `(V, d)`, nGPT's scale s_z `(V,)` (eq. 3) and the target t:

    z = s_z W h        lse = log(sum_v exp(z_v))        loss = lse - z_t + c lse^2 + e (z_t - mean_v z_v)

where c is `z_loss` and e is `label_smoothing`. With e the target's share of the label is 1 - e, and e is spread over
all V tokens, the target too: (1 - e) (lse - z_t) + e mean_v (lse - z_v) is lse - z_t plus the last term. The terms of c
and of e have sums of their own, because the reported loss is without them; gradients are of the whole loss. s_z is
multiplied into the rows of W in fp32, W' = diag(s_z) W and z = W' h, so that scaling the logits takes no separate
pass. Gradients of the summed loss, with p = softmax(z) and e_t the unit vector of t:

    dz = (1 + 2 c lse) p - (1 - e) e_t - e / V        dh = W'^T dz        dW' = sum over tokens of dz h^T
    dW = diag(s_z) dW'                                ds_z = rowsum(dW' * W)

With a `gradient_scale` g (nGPT's logit preconditioning, models/ngpt/model.py) dh = (diag(g) W)^T dz and dW = diag(g)
dW'; the loss and ds_z stay.

With a soft cap the loss is of c tanh(z / c) in place of z, and the gradient of z has the factor 1 - tanh(z / c)^2.

The loss is a sum, so the forward pass can compute its gradients too, up to the incoming factor dL/dloss. It takes
the tokens in chunks. For each chunk it computes the logits and losses, writes dz over the logits, and computes dh and
the chunk's part of dW'. The next chunk's logits use the same memory. The backward pass only multiplies by dL/dloss.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels.dispatch import operation, runs_on_triton
from ngpt_train.kernels.norm import at_least_fp32

GPU_ROWS = 4096  # tokens in a chunk: large enough for efficient products, 256 MiB of bf16 logits at V = 32k
CPU_ROWS = 512  # measured: with fewer the products are slower, with more they are no faster and take more memory
CACHED_ROWS = 64  # of a chunk on a CPU: their logits stay in its cache from one operation to the next
ALIGNMENT = 64  # elements; each row of a GPU's logits starts at a multiple, for aligned loads and products at any V


@operation("linear_cross_entropy")
def linear_cross_entropy(
    h: Tensor,
    matrix: Tensor,
    targets: Tensor,
    scale: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float = 0.0,
    gradient_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, cross_entropy, z_term) of the logits z = scale * (matrix h): sums over the targets, in nats.

    h: `(..., d)` in the dtype of the products; fp32, bf16, fp16 or fp64.
    matrix: `(V, d)`, the output embedding as stored; scale * matrix is cast to h's dtype.
    targets: `(...)` int64 in [0, V), or IGNORED for a token that does not count.
    scale: `(V,)`; None is 1.
    z_loss: adds z_loss * logsumexp(logits)^2 to the loss for every target that counts.
    soft_cap: z is soft_cap * tanh(z / soft_cap) instead; 0: no cap.
    label_smoothing: the loss has (1 - label_smoothing) times the cross-entropy and label_smoothing times the mean over
    the V tokens of -log p, as torch's F.cross_entropy; `cross_entropy` stays the plain one.
    gradient_scale: `(V,)`, without a gradient; replaces scale in the gradients of h and matrix; None is scale.

    Results are 0-dim, in fp32 (fp64 for fp64 h). Only loss has gradients. Without smoothing loss is cross_entropy +
    z_term. z_term is None where z_loss is 0. Gradients have the dtype and shape of their tensors; sums over tokens are
    in at least fp32. Never waits for the device. For a target outside the vocabulary torch's gather raises. The Triton
    kernel cannot raise: the loss, and each gradient with a part of this target, is NaN. Raises ValueError
    for shapes that do not fit.
    """
    h = at_least_fp32(h)
    z = soft_capped(F.linear(h, scaled(matrix.to(h.dtype), scale)), soft_cap)  # (..., V)
    if gradient_scale is not None:  # z of before, to which h and matrix are constants, and a 0 with their gradients
        z = F.linear(h.detach(), scaled(matrix.detach().to(h.dtype), scale))
        carrier = F.linear(h, scaled(matrix.to(h.dtype), gradient_scale))
        z = soft_capped(z + (carrier - carrier.detach()), soft_cap)
    counts = targets != IGNORED
    lse = z.logsumexp(-1)
    z_t = z.gather(-1, targets.where(counts, 0)[..., None]).squeeze(-1)
    cross_entropy = (lse - z_t).where(counts, 0).sum()
    z_term = (z_loss * lse.square()).where(counts, 0).sum()
    loss = cross_entropy + z_term
    if label_smoothing:
        mean_cross_entropy = (lse - z.mean(-1)).where(counts, 0).sum()  # over the V tokens as targets
        loss = (1 - label_smoothing) * cross_entropy + label_smoothing * mean_cross_entropy + z_term
    return loss, cross_entropy.detach(), z_term.detach() if z_loss else None


def check(h: Tensor, matrix: Tensor, targets: Tensor, *scales: Tensor | None) -> None:
    if h.shape[:-1] != targets.shape or h.shape[-1:] != matrix.shape[1:]:
        raise ValueError(f"h {tuple(h.shape)}, matrix {tuple(matrix.shape)}, targets {tuple(targets.shape)} do not fit")
    for scale in scales:
        if scale is not None and scale.shape != matrix.shape[:1]:
            raise ValueError(f"scale {tuple(scale.shape)} and matrix {tuple(matrix.shape)} do not fit")


@linear_cross_entropy.twin
def in_chunks(
    on_triton: bool, h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None = None, z_loss: float = 0.0,
    label_smoothing: float = 0.0, soft_cap: float = 0.0, gradient_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    check(h, matrix, targets, scale, gradient_scale)
    options = z_loss, label_smoothing, soft_cap, gradient_scale, torch.is_grad_enabled(), on_triton
    loss, *parts = _LinearCrossEntropy.apply(h, matrix, targets, scale, *options)
    cross_entropy, z_term = parts or (loss.detach(), None)
    return loss, cross_entropy, z_term if z_loss else None


def scaled(matrix: Tensor, scale: Tensor | None) -> Tensor:
    """W' = diag(s_z) W `(V, d)`: W' h is z <- z s_z of z = W h, eq. 3 of nGPT."""
    return matrix if scale is None else scale[:, None] * matrix  # eq. 3


def soft_capped(z: Tensor, soft_cap: float) -> Tensor:
    """c tanh(z / c) of logits z, with c = soft_cap; 0: z itself."""
    return soft_cap * torch.tanh(z / soft_cap) if soft_cap else z


@torch.no_grad()
def token_losses(
    h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None = None, soft_cap: float = 0.0
) -> Tensor:
    """The cross-entropy of each target, in the shape of targets; an IGNORED target has 0. Without gradients. Arguments
    and dtype as of `linear_cross_entropy`. Its cross_entropy is the sum."""
    on_triton = runs_on_triton("linear_cross_entropy", h)
    losses, *_ = forward_of(h)(h, matrix, targets, scale, 0.0, False, False, False, 0.0, on_triton, soft_cap)
    return losses.view(targets.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None, z_loss: float,
        label_smoothing: float, soft_cap: float, gradient_scale: Tensor | None, grad_enabled: bool, on_triton: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # grad_enabled is an argument because autograd is always off in here, and needs_input_grad ignores it.
        need_h, need_matrix, _, need_scale, *_ = (grad_enabled and needed for needed in ctx.needs_input_grad)
        losses, z_term, dh, dmatrix, dscale, smoothing = forward_of(h)(
            h, matrix, targets, scale, z_loss, need_h, need_matrix, need_scale, label_smoothing, on_triton, soft_cap,
            gradient_scale,
        )  # fmt: skip
        cross_entropy = losses.sum()  # one sum, whose order does not depend on the size of the chunks
        ctx.save_for_backward(dh, dmatrix, dscale)
        if z_loss == 0 and label_smoothing == 0:
            return (cross_entropy,)
        ctx.mark_non_differentiable(cross_entropy, z_term)
        loss = cross_entropy + z_term if z_loss else cross_entropy
        return loss + smoothing if label_smoothing else loss, cross_entropy, z_term

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # Not in place, so that a second backward pass through a retained graph is correct too.
        need_h, need_matrix, _, need_scale, *_ = ctx.needs_input_grad
        dh, dmatrix, dscale = ctx.saved_tensors
        d_h = times(dh, dloss) if need_h else None
        d_matrix = times(dmatrix, dloss) if need_matrix else None
        return d_h, d_matrix, None, dscale * dloss if need_scale else None, *[None] * 6


def times(gradient: Tensor, dloss: Tensor) -> Tensor:
    """gradient * dloss in gradient's dtype. fp16 cannot hold every 0-dim dloss, which a GPU would cast to it first."""
    if gradient.dtype != torch.float16:
        return gradient * dloss
    return (gradient.to(dloss.dtype) * dloss).to(gradient.dtype)


def losses_and_gradients(
    h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None, z_loss: float, need_h: bool, need_matrix: bool,
    need_scale: bool, label_smoothing: float, on_triton: bool, soft_cap: float = 0.0,
    gradient_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(cross-entropies `(N,)`, z-loss terms, dh, dmatrix, dscale, smoothing terms e (z_t - mean_v z_v)). The terms are
    sums over the N targets. The loss is the sum of cross-entropies and terms. A target that does not count has
    cross-entropy 0. Where a gradient is not needed, or an option is 0, the tensor is empty."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    weight = scaled(matrix, scale).to(h.dtype)  # W', (V, d)
    onward = scale if gradient_scale is None else gradient_scale  # of dz on its way to h and W
    weight_onward = weight if onward is scale or not need_h else scaled(matrix, onward).to(h.dtype)
    rows_of_h, rows_of_targets = h.reshape(-1, h.shape[-1]), targets.reshape(-1).contiguous()  # (N, d), (N,)
    n_rows, n_vocab = len(rows_of_h), len(weight)

    losses = h.new_empty(n_rows, dtype=dtype)
    z_terms = h.new_empty(n_rows if z_loss else 0, dtype=dtype)
    smoothing = h.new_empty(n_rows if label_smoothing else 0, dtype=dtype)
    dh = torch.empty_like(rows_of_h, memory_format=torch.contiguous_format) if need_h else h.new_empty(0)
    sum_needed = need_matrix or need_scale
    new = torch.empty_like if n_rows else torch.zeros_like
    dweight = new(weight, dtype=dtype, memory_format=torch.contiguous_format) if sum_needed else None

    chunk = GPU_ROWS if h.is_cuda else CPU_ROWS
    width = -(-n_vocab // ALIGNMENT) * ALIGNMENT if on_triton else n_vocab
    logits = buffer = h.new_empty(min(chunk, n_rows), width)
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
        few = chunk if h.is_cuda or on_triton else CACHED_ROWS
        for first in range(start, here.stop, few):
            some = slice(first, min(first + few, here.stop))
            z = logits[first - start : some.stop - start]
            sums = losses[some], z_terms[some], smoothing[some]
            cross_entropy_(z, rows_of_targets[some], *sums, z_loss, label_smoothing, soft_cap, gradient)
        if need_h:
            torch.mm(logits, weight_onward, out=dh[here])
        if dweight is not None:
            _add_product_(dweight, logits.t(), x, keep=int(start > 0))
    del buffer, logits  # their memory serves the tensors below

    dmatrix = dscale = None
    if dweight is not None and need_scale:
        assert scale is not None
        dscale = (dweight * matrix).sum(1).to(scale.dtype)
    if dweight is not None and need_matrix:
        dmatrix = (dweight if onward is None else dweight.mul_(onward[:, None])).to(matrix.dtype)
    return (
        losses,
        z_terms.sum() if z_loss else z_terms,
        dh.view(h.shape) if need_h else dh,
        h.new_empty(0) if dmatrix is None else dmatrix,
        h.new_empty(0) if dscale is None else dscale,
        smoothing.sum() if label_smoothing else smoothing,
    )


linear_cross_entropy_forward = torch.library.custom_op(
    "ngpt_train::linear_cross_entropy_forward", losses_and_gradients, mutates_args=()
)


def forward_of(h: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """`losses_and_gradients`, as one operation for torch.compile and for tensors without memory. The first call of an
    operation imports the compiler, which takes as long as importing torch."""
    traced = torch.compiler.is_compiling() or type(h) is not Tensor or h.is_meta
    return linear_cross_entropy_forward if traced else losses_and_gradients


@linear_cross_entropy_forward.register_fake
def _(
    h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None, z_loss: float, need_h: bool, need_matrix: bool,
    need_scale: bool, label_smoothing: float, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = torch.promote_types(h.dtype, torch.float32)
    return (
        h.new_empty(targets.numel(), dtype=dtype),
        h.new_empty(() if z_loss else 0, dtype=dtype),
        h.new_empty(h.shape if need_h else 0),
        matrix.new_empty(matrix.shape) if need_matrix else h.new_empty(0),
        scale.new_empty(scale.shape) if need_scale and scale is not None else h.new_empty(0),
        h.new_empty(() if label_smoothing else 0, dtype=dtype),
    )


def _cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, z_terms: Tensor, smoothing: Tensor,
    z_loss: float, label_smoothing: float, soft_cap: float, gradient: bool,
) -> None:  # fmt: skip
    """Writes the cross-entropies of logits `(N, V)` to losses `(N,)`, c lse^2 to z_terms, `(N,)`, empty if c = 0, and
    e (z_t - mean_v z_v) to smoothing, `(N,)`, empty if e = 0.

    If gradient, it writes dz over the logits; otherwise it may leave intermediate values there.
    """
    counts = (targets != IGNORED)[:, None]
    index = targets[:, None].where(counts, 0)  # (N, 1)
    z = logits.to(losses.dtype)  # for fp32 and fp64 the logits themselves
    slope = None
    if soft_cap:
        share = torch.tanh(z / soft_cap)  # (N, V)
        torch.mul(share, soft_cap, out=z)
        slope = share.square_().neg_().add_(1)  # d capped / dz
    target_logits = z.gather(1, index)
    if label_smoothing:
        smoothing.copy_((label_smoothing * (target_logits - z.mean(1, keepdim=True))).where(counts, 0).squeeze(1))
    largest = z.amax(1, keepdim=True)
    total = z.sub_(largest).exp_().sum(1, keepdim=True)
    lse = largest + total.log()
    losses.copy_((lse - target_logits).where(counts, 0).squeeze(1))
    if z_loss:
        z_terms.copy_((z_loss * lse.square()).where(counts, 0).squeeze(1))
    if gradient:
        z.mul_(((1 + 2 * z_loss * lse) / total).where(counts, 0))
        if label_smoothing:
            z.sub_((label_smoothing / z.shape[1]) * counts.to(z.dtype))
        z.scatter_(1, index, z.gather(1, index) - (1 - label_smoothing) * counts.to(z.dtype))
        if slope is not None:
            z.mul_(slope)
        if z is not logits:
            logits.copy_(z)


def _add_product_(total: Tensor, a: Tensor, b: Tensor, keep: int) -> None:
    """total <- keep total + a b, summed in total's dtype. keep is 1 or 0; with 0 the old total is not read."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=keep)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=keep, out_dtype=total.dtype, out=total)
    elif keep:  # on CPUs a product always has the dtype of its factors
        total.add_(torch.mm(a, b))
    else:
        total.copy_(torch.mm(a, b))
