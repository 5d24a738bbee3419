"""A step on the hypersphere (nGPT, eq. 10 and 11), and its gradients by hand.

    x^ = x / ||x||,  u = h + a (x^ - h),  h' = u / ||u||        a: alpha, one number per dimension

With g the gradient of h':

    du = (g - h' (h' . g)) / ||u||,    dh = du - a du,    da = sum over tokens of du (x^ - h)
    dx = (a du - x^ (x^ . a du)) / ||x||
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.kernels.norm import SHORTEST, at_least_fp32, normalize
from ngpt_train.kernels.operation import operation


class HiddenState(NamedTuple):
    """The hidden state h `(..., d_model)` of a model on the sphere, as two tensors that share values and memory.

    The next step moves `to_move`, the next matrix product reads `to_read`. Each tensor gets a gradient of its own, and
    the backward pass of `sphere_step` adds the two while it reads them. If h were one tensor, autograd would add its
    two gradients in a separate pass, which moves 6 % more bytes in a compiled block (docs/benchmarks/bytes.md).
    """

    to_move: Tensor  # h in h + alpha (x^ - h)
    to_read: Tensor  # the input of attention or MLP

    @classmethod
    def of(cls, h: Tensor) -> "HiddenState":
        """The state of the first block, for h `(..., d_model)`.

        It has the form that a compiled block returns, so that one graph fits the first block and all others: with
        gradients two tensors, without gradients the same tensor twice.
        """
        return cls(h, h.view_as(h) if torch.is_grad_enabled() else h)


@operation("sphere_step")
def sphere_step(h: HiddenState, x: Tensor, alpha: Tensor) -> HiddenState:
    """h <- Norm(h + alpha (h_A - h)), where h_A = Norm(x) and x is the output of attention or MLP: eq. 10 and 11.

    h, x `(..., d_model)`, alpha `(d_model,)` in fp32 -> `(..., d_model)` in h's dtype, computed at least in fp32.
    """
    old, h_A = at_least_fp32(h.to_move), normalize(x)
    new = normalize(old + alpha * (h_A - old)).to(h.to_move.dtype)  # eq. 10 and 11
    return HiddenState(new, new)


@sphere_step.twin
def by_hand_or_on_triton(on_triton: bool, h: HiddenState, x: Tensor, alpha: Tensor) -> HiddenState:
    return HiddenState(*_SphereStep.apply(h.to_move, x, alpha, on_triton))


class _SphereStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor, alpha: Tensor, on_triton: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an output that nothing uses has gradient None
        ctx.on_triton = on_triton
        if on_triton:
            from ngpt_train.kernels.gpu.sphere_step import sphere_step_forward

            out, r_x, r_u = sphere_step_forward(h, x, alpha)
            ctx.save_for_backward(h, x, alpha, r_x, r_u)
        else:
            out, r_x, r_u = _forward(h, x, alpha)
            # The next matrix product keeps `out` for its own backward pass, so it costs no memory here.
            ctx.save_for_backward(h, x, alpha, r_x, r_u, out)
        # The same memory twice. torch.compile takes a plain view for the same output: autograd then adds up the two
        # gradients outside of the graph, which costs 8 bytes an element. It takes a split's output for a separate one.
        return out, out.split(out.shape[-1], dim=-1)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_too: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            g, g_too = g_too, None
        if g is None:
            return None, None, None, None
        if ctx.on_triton:
            from ngpt_train.kernels.gpu.sphere_step import sphere_step_backward

            return *sphere_step_backward(g, g_too, *ctx.saved_tensors), None
        return *_backward(g if g_too is None else g + g_too, *ctx.saved_tensors), None


def _forward(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h' and 1 / ||x||, 1 / ||u|| `(..., 1)`."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    r_x = _reciprocal_length(x.to(dtype))
    u = torch.lerp(h.to(dtype), x * r_x, alpha.to(dtype))
    r_u = _reciprocal_length(u)
    # torch 2.11 compiles no gradient for an op that returns its input itself: a product in place, a cast to the same
    # dtype. Uncompiled, the product in place is the better one: new memory costs more than the product.
    out = u * r_u if torch.compiler.is_compiling() else u.mul_(r_u)
    return out if out.dtype == h.dtype else out.to(h.dtype), r_x, r_u


def _backward(
    g: Tensor, h: Tensor, x: Tensor, alpha: Tensor, r_x: Tensor, r_u: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, dx and dalpha. In place where possible, because the time goes into passes over memory."""
    g = g.to(r_x.dtype)
    du = torch.addcmul(g, out, _dot(out, g), value=-1).mul_(r_u)
    away = torch.mul(x, r_x).sub_(h)
    dalpha = (du * away).flatten(0, -2).sum(0)
    dx_hat = du * alpha
    dx = torch.addcmul(dx_hat, x, _dot(x, dx_hat).mul_(r_x.square()), value=-1).mul_(r_x)
    return du.sub_(dx_hat).to(h.dtype), dx.to(x.dtype), dalpha


def _reciprocal_length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SHORTEST).reciprocal_()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
