"""Adam and the projection of rows onto the sphere or into the ball, in one pass over the rows of a matrix.

The Triton kernel moves 28 bytes per parameter: it reads w, g, m and v and writes w, m and v in fp32; a bf16 copy of w
costs 2 more. A projection in a separate pass would add 12.
"""

import torch
from torch import Tensor

from ngpt_train.core.constants import Constraint
from ngpt_train.kernels.dispatch import operation
from ngpt_train.kernels.norm import FLOORS

WIDEST = 8192  # columns of the widest matrix that the Triton kernel takes: a program holds a whole row


@operation("adam")
@torch.no_grad()
def adam_rows_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    constraint: Constraint,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    copy: Tensor | None = None,
) -> None:
    """One step of Adam: updates `weight`, its moments and `copy`, in place, without waiting for the device.

    weight, exp_avg, exp_avg_sq: `(rows, d)` fp32, contiguous.
    gradient: `(rows, d)` fp32, bf16 or fp16, with any strides.
    copy: `(rows, d)` bf16, contiguous; receives the new weight.
    step, grad_scale, found_inf: 0-dim fp32 on the device.

    If found_inf is not 0, nothing is written. `step` is t, and stays: the caller counts steps, but none with found_inf.
    Raises ValueError for shapes and strides that do not fit.
    """
    g = gradient.to(weight.dtype) if grad_scale is None else gradient.to(weight.dtype) / grad_scale
    m = beta1 * exp_avg + (1 - beta1) * g
    v = beta2 * exp_avg_sq + (1 - beta2) * g.square()
    t = step.double()  # in fp32, 1 - beta2^t would be off by 5e-5 at the first step
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    w = (1 - lr * weight_decay) * weight  # decoupled
    w = w - lr * m_hat / (v_hat.sqrt() + eps)
    if constraint != "free":  # per row: w / max(||w||, 1e-12) on the sphere, w / max(||w||, 1) in the ball
        w = w / torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp_min(FLOORS[constraint])
    skipped = torch.zeros_like(step) if found_inf is None else found_inf
    for old, new in ((weight, w), (exp_avg, m), (exp_avg_sq, v), (copy, w)):
        if old is not None:
            old.copy_(torch.where(skipped != 0, old, new))


def check(weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None) -> None:
    written = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "copy": copy}
    for name, tensor in (written | {"gradient": gradient}).items():
        if tensor is None:
            continue
        if tensor.ndim != 2 or tensor.shape != weight.shape:
            raise ValueError(f"adam_rows_: {name} {tuple(tensor.shape)} beside weight {tuple(weight.shape)}, (rows, d)")
        if name in written and not tensor.is_contiguous():
            raise ValueError(f"adam_rows_: {name} is written, and its strides {tensor.stride()} are not contiguous")


@adam_rows_.unsupported
def unsupported(weight: Tensor, *_: object, **__: object) -> str | None:
    """Names the dtype or width of the weight if the kernel does not support it; else None."""
    if weight.dtype != torch.float32:
        return f"weights in {weight.dtype}"
    return f"rows of {weight.shape[-1]}" if weight.shape[-1] > WIDEST else None


@adam_rows_.twin
@torch.no_grad()
def in_few_passes_(
    on_triton: bool, weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, constraint: Constraint, grad_scale: Tensor | None,
    found_inf: Tensor | None, *, copy: Tensor | None = None,
) -> None:  # fmt: skip
    """On Triton in one pass; else torch's fused AdamW, then the projection, both in the weight's dtype."""
    check(weight, gradient, exp_avg, exp_avg_sq, copy)
    if on_triton:
        from ngpt_train.kernels.gpu import adam

        adam.adam_rows_(
            weight, gradient, exp_avg, exp_avg_sq, copy, step, lr, beta1, beta2, eps, weight_decay,
            FLOORS.get(constraint), grad_scale, found_inf,
        )  # fmt: skip
        return
    # torch's kernel assumes that the gradient has the weight's strides, and writes the unscaled gradient back.
    g = gradient.to(weight.dtype, copy=grad_scale is not None).contiguous()
    torch._fused_adamw_(
        [weight], [g], [exp_avg], [exp_avg_sq], [], [step],
        lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    skipped = torch.zeros_like(step) if found_inf is None else found_inf
    if constraint != "free":
        length = torch.linalg.vector_norm(weight, dim=-1, keepdim=True).clamp_min_(FLOORS[constraint])
        weight.div_(torch.where(skipped != 0, 1.0, length))
    if copy is not None:
        copy.copy_(torch.where(skipped != 0, copy, weight))
