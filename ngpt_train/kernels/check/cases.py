"""Inputs for a recorded call, and its formula.

Widths, strides, dtypes and options are the call's. Rows are fewer where all would need too much memory: a kernel treats
all rows alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels import adam, cross_entropy, rotary, sphere_step, swiglu
from ngpt_train.kernels.check.calls import Call
from ngpt_train.kernels.check.deviation import MATRIX_TOLERANCE, VECTOR_TOLERANCE, Comparison, Error, Inputs, Operation
from ngpt_train.kernels.check.draw import Draw
from ngpt_train.kernels.check.of_attention import AttentionCase
from ngpt_train.kernels.sphere_step import HiddenState

MOST_ELEMENTS = 2**27  # of an input: 0.5 GB in fp32; the formula in fp64 takes an eighth at a time
OF_ATTENTION = ("attention", "attention of documents")
HEAD_TOKENS = cross_entropy.GPU_ROWS + 1024  # of the loss: two chunks of the kernel
PART = 512  # tokens whose logits in fp64 the formula holds at once


def case_of(call: Call, device: torch.device, kernels: bool = True, every_token: bool = False) -> Comparison:
    """The comparison of a call of a fused operation.

    kernels: True if Triton's run, which round less than PyTorch. every_token: the loss, too, takes all tokens.
    """
    if call.kernel == "linear_cross_entropy":
        return cross_entropy_case(call, Draw(device), every_token)
    return CASES[call.kernel](call, Draw(device), kernels)


def errors_of_call(call: Call, device: torch.device) -> dict[str, Error]:
    """The errors of a call beside the formula, by the names of outputs and gradients."""
    if call.kernel in OF_ATTENTION:
        return AttentionCase(call, Draw(device)).errors()
    return case_of(call, device).errors()


def sphere_step_case(call: Call, draw: Draw, kernels: bool) -> Comparison:
    shape, d = fitting(call.shape), call.shape[-1]

    def inputs() -> Inputs:
        h = F.normalize(draw.normal(*shape), dim=-1).to(getattr(torch, call["h"])).requires_grad_()
        x = draw.activations(shape, call.dtype, call.stride, 0.1)
        gradients = draw.normal(*shape).to(h.dtype), draw.normal(*shape).to(h.dtype)
        return Inputs((h, x), (draw.vector(d, 0.05),), gradients)

    def on_sphere(function: Callable[..., HiddenState]) -> Operation:
        def step(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
            first, second = function(HiddenState(h, h), x, alpha)
            return first, second.view_as(second) if second is first else second  # two outputs, each with its gradient

        return step

    ours, exact = on_sphere(sphere_step.sphere_step), on_sphere(sphere_step.sphere_step.formula)
    return Comparison(str(call), ours, exact, inputs, tolerance_of_sums(call, kernels))


def swiglu_case(call: Call, draw: Draw, kernels: bool) -> Comparison:
    shape, m = fitting(call.shape), call.shape[-1] // 2

    def inputs() -> Inputs:
        shared = (draw.vector(m, 1.0), draw.vector(m, 1.0)) if call["scaled"] else ()
        uv = draw.activations(shape, call.dtype, call.stride)
        return Inputs((uv,), shared, (draw.normal(*shape[:-1], m).to(uv.dtype),))

    def one_output(function: Callable[..., Tensor]) -> Operation:
        return lambda *inputs: (function(*inputs),)

    ours, exact = one_output(swiglu.swiglu), one_output(swiglu.swiglu.formula)
    return Comparison(str(call), ours, exact, inputs, tolerance_of_sums(call, kernels))


def rotary_case(call: Call, draw: Draw, kernels: bool) -> Comparison:
    B, T, width = fitting(call.shape)
    options = rotary.Options(*call["options"])
    D = width // (options.n_heads + 2 * options.n_kv_heads)

    def inputs() -> Inputs:
        qkv = draw.activations((B, T, width), call.dtype, call.stride)
        cos, sin = draw.angles(T, D)
        table = (cos.expand(B, T, 1, -1).contiguous(), sin.expand(B, T, 1, -1).contiguous())
        rows, shared = ((qkv, *table), ()) if call["of_rows"] else ((qkv,), (cos, sin))
        scale = (draw.vector(options.n_heads * D, 1.0),) if call["scaled"] else ()
        heads = options.n_heads, options.n_kv_heads, options.n_kv_heads
        gradients = tuple(draw.normal(B, T, n, D).to(qkv.dtype) for n in heads)
        return Inputs(rows, (*shared, *scale), gradients)

    def in_heads(function: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Operation:
        def step(qkv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
            of_heads = rotary.QKV.of(qkv, options.n_heads, options.n_kv_heads)
            return function(of_heads, rotary.Rope(cos, sin, options.interleaved), options.normalized, scale)

        return step

    ours, exact = in_heads(rotary.rotary), in_heads(rotary.rotary.formula)
    return Comparison(str(call), ours, exact, inputs, tolerance_of_sums(call, kernels))


def cross_entropy_case(call: Call, draw: Draw, every_token: bool) -> Comparison:
    """Two chunks of tokens, or all with every_token: products in fp64 are slow on many GPUs."""
    d, V, z_loss, smoothing = call.shape[-1], call["vocabulary"], call["z_loss"], call["label_smoothing"]
    n_tokens = torch.Size(call.shape[:-1]).numel()
    n_tokens = n_tokens if every_token else min(HEAD_TOKENS, n_tokens)
    parts = min(n_tokens, max(8, n_tokens // PART))
    shape = (parts, n_tokens // parts)

    def inputs() -> Inputs:
        targets = draw.integers(V, *shape)
        targets[:, ::16] = targets[:, ::16].where(draw.integers(2, *targets[:, ::16].shape) == 0, IGNORED)
        matrix = F.normalize(draw.normal(V, d), dim=-1).to(getattr(torch, call["matrix"])).requires_grad_()
        shared = (matrix, draw.vector(V, 1.0)) if call["scaled"] else (matrix,)
        h = draw.normal(*shape, d).to(getattr(torch, call.dtype)).requires_grad_()
        return Inputs((h, targets), shared, (torch.ones((), device=draw.device),))

    def loss(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        return cross_entropy.linear_cross_entropy(h, matrix, targets, scale, z_loss, smoothing)[:1]

    # Training needs the loss and gradients. Evaluation needs the losses of tokens, from a pass without gradients.
    def ours(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        return *loss(h, targets, matrix, scale), cross_entropy.token_losses(h, matrix, targets, scale)

    def exact(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        total, *_ = cross_entropy.linear_cross_entropy.formula(h, matrix, targets, scale, z_loss, smoothing)
        with torch.no_grad():
            logits = h @ matrix.t() if scale is None else h @ matrix.t() * scale
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
        return total, losses.view(targets.shape)

    # Products and logits are rounded to the activations' dtype, so their sums are no more precise.
    tolerance = MATRIX_TOLERANCE[getattr(torch, call.dtype)]
    return Comparison(str(call), ours, exact, inputs, tolerance, timed=loss, chunks=parts)


def adam_case(call: Call, draw: Draw, kernels: bool) -> Comparison:
    (rows, d), betas = fitting(call.shape), call["betas"]

    def inputs() -> Inputs:
        weight = F.normalize(draw.normal(rows, d), dim=-1)
        gradient, exp_avg = (0.01 * draw.normal(rows, d) for _ in range(2))
        exp_avg_sq = 1e-4 * (0.5 + draw.uniform(rows, d))
        numbers = (3.0, 2.0, 0.0, 1.0)  # step, grad_scale, found_inf of a taken and of a skipped step
        shared = tuple(torch.tensor(number, device=draw.device) for number in numbers)
        return Inputs((weight, gradient, exp_avg, exp_avg_sq), shared, ())

    def stepped(function: Callable[..., None]) -> Operation:
        def step(
            w: Tensor, g: Tensor, m1: Tensor, m2: Tensor, t: Tensor, scale: Tensor, taken: Tensor, skipped: Tensor
        ) -> tuple[Tensor, ...]:
            left = w.clone(), m1.clone(), m2.clone()
            hyper = 1e-3, *betas, call["eps"], call["weight_decay"], call["unit_rows"]
            copy = w.to(torch.bfloat16) if call["copies"] else None
            function(w, g, m1, m2, t, *hyper, scale, taken, copy=copy)
            function(left[0], g, *left[1:], t, *hyper, scale, skipped, copy=copy)
            # The share of a row's elements whose copy is the weight, rounded: 1.
            same = torch.ones_like(w) if copy is None else (copy - w).abs() <= torch.finfo(torch.bfloat16).eps * w.abs()
            return w, m1, m2, *left, same.to(w.dtype).mean(1)

        return step

    def timed(w: Tensor, g: Tensor, m1: Tensor, m2: Tensor, t: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        eps, decay, unit_rows = call["eps"], call["weight_decay"], call["unit_rows"]
        adam.adam_rows_(w, g, m1, m2, t, 1e-3, betas[0], betas[1], eps, decay, unit_rows, None, None)
        return w, m1, m2

    ours, exact = stepped(adam.adam_rows_), stepped(adam.adam_rows_.formula)
    return Comparison(str(call), ours, exact, inputs, tolerance_of_sums(call, kernels), timed=timed)


CASES: dict[str, Callable[[Call, Draw, bool], Comparison]] = {
    "sphere_step": sphere_step_case,
    "swiglu": swiglu_case,
    "rotary": rotary_case,
    "adam": adam_case,
}


def tolerance_of_sums(call: Call, kernels: bool) -> float:
    """Tolerance of gradients by sums over tokens. The kernels sum fp32 values; plain PyTorch rounds some values to the
    activations' dtype before."""
    return (VECTOR_TOLERANCE if kernels else MATRIX_TOLERANCE)[getattr(torch, call.dtype)]


def fitting(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, cut to MOST_ELEMENTS: fewer rows, then fewer tokens of one row. The width stays."""
    first, *rest = shape
    of_one = torch.Size(rest).numel()
    if first * of_one <= MOST_ELEMENTS:
        return shape
    if of_one <= MOST_ELEMENTS or len(rest) < 2:
        return (max(1, MOST_ELEMENTS // of_one), *rest)
    return (1, *fitting(tuple(rest)))
