"""A step on the hypersphere (nGPT, eq. 10 and 11), and its gradients.

    x^ = x / ||x||,  u = h + a (x^ - h),  h' = u / ||u||        a: one share per dimension

With g the gradient of h':

    du = (g - h' (h' . g)) / ||u||,    dh = du - a du,    da = sum over tokens of du (x^ - h)
    dx = (a du - x^ (x^ . a du)) / ||x||

Lengths below 1e-12 count as 1e-12, so that a row of zeros has neither a direction nor an infinite gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.kernels.dispatch import runs_on_triton

SHORTEST = 1e-12


def reference(h: Tensor, x: Tensor, alpha: Tensor) -> Tensor:
    """The formula, as autograd differentiates it. Computed at least in fp32, returned in h's dtype."""
    wide = torch.promote_types(h.dtype, torch.float32)
    x_hat = _unit(x.to(wide))
    return _unit(h.to(wide) + alpha * (x_hat - h.to(wide))).to(h.dtype)


def sphere_step(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """h' twice: h, x `(..., d_model)`, alpha `(d_model,)` in fp32 -> `(..., d_model)` in h's dtype.

    Two tensors of the same values: where one goes into a matrix product and the other into the next step, their
    gradients arrive apart, and the kernel adds them where it reads them, in place of a pass that only adds.
    """
    return _SphereStep.apply(h, x, alpha, runs_on_triton("sphere_step", h, x, alpha))


class _SphereStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor, alpha: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # of two outputs one may go nowhere
        ctx.triton = triton
        if triton:
            from ngpt_train.kernels.gpu.sphere_step import sphere_step_forward

            out, r_x, r_u = sphere_step_forward(h, x, alpha)
            ctx.save_for_backward(h, x, alpha, r_x, r_u)
        else:
            out, r_x, r_u = _forward(h, x, alpha)
            ctx.save_for_backward(h, x, alpha, r_x, r_u, out)  # which whoever reads it keeps anyway
        # The same memory. A plain view torch.compile does not take for an output of its own: autograd adds up both
        # gradients outside of the graph, which costs 8 bytes an element. What a split gives it does.
        return out, out.split(out.shape[-1], dim=-1)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_too: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            g, g_too = g_too, None
        if g is None:
            return None, None, None, None
        if ctx.triton:
            from ngpt_train.kernels.gpu.sphere_step import sphere_step_backward

            return *sphere_step_backward(g, g_too, *ctx.saved_tensors), None
        return *_backward(g if g_too is None else g + g_too, *ctx.saved_tensors), None


def _forward(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h' and 1 / ||x||, 1 / ||u|| `(..., 1)`."""
    wide = torch.promote_types(h.dtype, torch.float32)
    r_x = _reciprocal_length(x.to(wide))
    u = torch.lerp(h.to(wide), x * r_x, alpha.to(wide))
    r_u = _reciprocal_length(u)
    # torch 2.11's compiler gives no gradient to what an operation returns of its own input: a product in place, a cast
    # that changes nothing. Where nothing is compiled, new memory costs more than the product.
    out = u * r_u if torch.compiler.is_compiling() else u.mul_(r_u)
    return out if out.dtype == h.dtype else out.to(h.dtype), r_x, r_u


def _backward(
    g: Tensor, h: Tensor, x: Tensor, alpha: Tensor, r_x: Tensor, r_u: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, dx and dalpha. In place where it can be: a pass over memory is what costs time here."""
    g = g.to(r_x.dtype)
    du = torch.addcmul(g, out, _dot(out, g), value=-1).mul_(r_u)
    away = torch.mul(x, r_x).sub_(h)
    dalpha = (du * away).flatten(0, -2).sum(0)
    dx_hat = du * alpha
    dx = torch.addcmul(dx_hat, x, _dot(x, dx_hat).mul_(r_x.square()), value=-1).mul_(r_x)
    return du.sub_(dx_hat).to(h.dtype), dx.to(x.dtype), dalpha


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(SHORTEST)


def _reciprocal_length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SHORTEST).reciprocal_()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
