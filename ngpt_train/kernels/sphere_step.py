"""A step on the hypersphere (nGPT, eq. 10 and 11), and its gradients by hand.

    x^ = x / ||x||,  u = h + a (x^ - h),  h' = u / ||u||        a: alpha, one number per dimension

With g the gradient of h':

    du = (g - h' (h' . g)) / ||u||,    dh = du - a du,    da = sum over tokens of du (x^ - h)
    dx = (a du - x^ (x^ . a du)) / ||x||
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.kernels.dispatch import operation
from ngpt_train.kernels.norm import at_least_fp32, cast, normalize, reciprocal_length


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
        """The state of the first block, for h `(..., d_model)`. It has the form that a compiled block returns, so that
        one graph fits all blocks: with gradients two tensors, else one tensor twice."""
        return cls(h, h.view_as(h) if torch.is_grad_enabled() else h)


# (h, h_new, alpha) -> h moved towards h_new, both of length 1, by the share alpha of the way in each dimension.
Move = Callable[[Tensor, Tensor, Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]


def lerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h + alpha (h_new - h): eq. 8."""
    return h + alpha * (h_new - h)


def slerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """sin((1 - alpha) theta) / sin(theta) h + sin(alpha theta) / sin(theta) h_new, alpha per dimension: eq. 6."""
    # arccos has no derivative at +-1. At the limit SLERP and LERP agree to rounding.
    limit = 1 - torch.finfo(h_new.dtype).eps
    theta = (h * h_new).sum(-1, keepdim=True).clamp(-limit, limit).arccos()
    return (((1 - alpha) * theta).sin() * h + (alpha * theta).sin() * h_new) / theta.sin()


def riemannian(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h - alpha (h (h^T h_new) - h_new): eq. 25, the part of h_new - h that is tangent to the sphere at h."""
    return h - alpha * (h * (h * h_new).sum(-1, keepdim=True) - h_new)


@operation("sphere_step")
def sphere_step(
    h: HiddenState, x: Tensor, alpha: Tensor, move: Move = lerp, norm: Norm = normalize, option: str | None = None
) -> HiddenState:
    """h <- Norm(h + alpha (h_A - h)), where h_A = Norm(x) and x is the output of attention or MLP: eq. 10 and 11.

    h, x `(..., d_model)`, alpha `(d_model,)` in fp32 -> `(..., d_model)` in h's dtype, computed at least in fp32.
    move: LERP, or another way from h to h_A, as in eq. 26. norm: Norm. option: the config key of another move or norm,
    for the log: the kernel and the gradients by hand have LERP and plain Norm only.
    """
    h_A = norm(x)
    new = cast(norm(move(h.to_move, h_A, alpha)), h.to_move.dtype)  # eq. 10 and 11
    return HiddenState(new, new)


@sphere_step.unsupported
def unsupported(*_: Any, option: str | None = None, **__: Any) -> str | None:
    return option


@sphere_step.twin
def by_hand_or_on_triton(on_triton: bool, h: HiddenState, x: Tensor, alpha: Tensor, **options: Any) -> HiddenState:
    if options:
        return sphere_step.formula(h, x, alpha, **options)
    return HiddenState(*_SphereStep.apply(h.to_move, x, alpha, on_triton))


class _SphereStep(torch.autograd.Function):
    """The formula or, on Triton, its kernel, with the gradients above."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor, alpha: Tensor, on_triton: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused output has gradient None
        ctx.on_triton = on_triton
        if on_triton:
            from ngpt_train.kernels.gpu.sphere_step import sphere_step_forward

            out, r_x, r_u = sphere_step_forward(h, x, alpha)
            ctx.save_for_backward(h, x, alpha, r_x, r_u)
        else:
            reciprocals = []  # 1 / ||x|| and 1 / ||u||

            def norm(x: Tensor) -> Tensor:
                reciprocals.append(reciprocal_length(at_least_fp32(x)))
                return x * reciprocals[-1]

            wide = at_least_fp32(h)
            state = HiddenState(wide, wide)
            out = cast(sphere_step.formula(state, x, cast(alpha, wide.dtype), torch.lerp, norm).to_move, h.dtype)
            # The next matrix product keeps `out` for its own backward pass, so it costs no memory here.
            ctx.save_for_backward(h, x, alpha, *reciprocals, out)
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


def _backward(
    g: Tensor, h: Tensor, x: Tensor, alpha: Tensor, r_x: Tensor, r_u: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, dx and dalpha. In place where possible, because the time goes into passes over memory."""
    dtypes = h.dtype, x.dtype
    g, h, x, out = (cast(y, r_x.dtype) for y in (g, h, x, out))
    du = torch.addcmul(g, out, _dot(out, g), value=-1).mul_(r_u)
    away = torch.mul(x, r_x).sub_(h)
    dalpha = (du * away).flatten(0, -2).sum(0)
    dx_hat = du * alpha
    dx = torch.addcmul(dx_hat, x, _dot(x, dx_hat).mul_(r_x.square()), value=-1).mul_(r_x)
    return du.sub_(dx_hat).to(dtypes[0]), dx.to(dtypes[1]), dalpha


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
