"""Inputs for a recorded call, the same each time, and its formula.

Widths, strides, dtypes and options are the call's. Rows are fewer where all would need too much memory.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.kernels import adam, attention, cross_entropy, dispatch, rotary, sphere_step, swiglu
from ngpt_train.kernels.attention import Mask, Packed
from ngpt_train.kernels.check.calls import Call
from ngpt_train.kernels.check.formula_comparison import (
    MATRIX_TOLERANCE,
    VECTOR_TOLERANCE,
    Comparison,
    Error,
    Inputs,
    Operation,
    copied,
    error_of,
    errors_of,
    gradients_of,
    seconds_of,
)
from ngpt_train.kernels.sphere_step import HiddenState

MOST_ELEMENTS = 2**27  # of an input: 0.5 GB in fp32; the formula in fp64 takes an eighth at a time
OF_ATTENTION = ("attention", "attention of documents")
HEAD_TOKENS = cross_entropy.GPU_ROWS + 1024  # of the loss: two chunks of the kernel
PART = 512  # tokens whose logits in fp64 the formula holds at once
ROOM = 64  # boundaries of documents for each row, most of them of empty ones, as in training
# Kernels round inputs, outputs, probabilities and the gradients of probabilities to the activations' dtype.
ROUNDINGS = 4
POISONED = 2**28  # bytes of memory that are NaN before the kernel asks for new memory
# Of times: measurements, and the operations inside of blocks. Where blocks are compiled, plain PyTorch is compiled for
# the comparison.
ROUNDS = 5
IN_BLOCKS = ("sphere_step", "swiglu", "rotary")


class Draw:
    """Draws in fp32 on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator, device=self.device)

    def vector(self, size: int, around: float) -> Tensor:
        """A learned scale `(size,)`."""
        return (around * (1 + 0.3 * self.normal(size))).requires_grad_()

    def activations(self, shape: Sequence[int], dtype: str, stride: Sequence[int] | None, size: float = 1.0) -> Tensor:
        """Values of about `size` that get a gradient. dtype: such as "bfloat16"; stride: None is contiguous."""
        values = (size * self.normal(*shape)).to(getattr(torch, dtype))
        if stride is not None:
            values = torch.empty_strided(shape, stride, dtype=values.dtype, device=self.device).copy_(values)
        return values.requires_grad_()

    def angles(self, T: int, D: int) -> tuple[Tensor, Tensor]:
        """cos and sin `(T, 1, D/2)` of rotary positions."""
        pairs = torch.arange(0, D, 2, device=self.device, dtype=torch.float64)
        places = torch.arange(T, device=self.device, dtype=torch.float64)
        angles = torch.outer(places, 10_000 ** (-pairs / D))[:, None]
        return angles.cos().float(), angles.sin().float()


def case_of(call: Call, device: torch.device, kernels: bool = True, every_token: bool = False) -> Comparison:
    """The comparison of a call of a fused operation. kernels: True if Triton's run, which round less than PyTorch.
    every_token: the loss, too, takes all tokens."""
    if call.kernel == "linear_cross_entropy":
        return cross_entropy_case(call, Draw(device), every_token)
    operation, form, inputs, timed = CASES[call.kernel](call, Draw(device))
    # Gradients by sums over tokens: the kernels sum fp32 values, plain PyTorch rounds some to the activations' dtype.
    tolerance = (VECTOR_TOLERANCE if kernels else MATRIX_TOLERANCE)[getattr(torch, call.dtype)]
    return Comparison(str(call), form(operation), form(operation.formula), inputs, tolerance, timed)


# An operation, its form for a comparison, what draws its inputs, and the form to be timed if that is another.
Case = tuple[dispatch.Operation[..., Any], Callable[[Callable[..., Any]], Operation], Callable[[], Inputs], Any]


def errors_of_call(call: Call, device: torch.device) -> dict[str, Error]:
    """The errors of a call beside the formula, by the names of outputs and gradients."""
    if call.kernel in OF_ATTENTION:
        return errors_of_attention(call, Draw(device))
    case = case_of(call, device)
    return errors_of(case, case.draw())


def sphere_step_case(call: Call, draw: Draw) -> Case:
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

    return sphere_step.sphere_step, on_sphere, inputs, None


def swiglu_case(call: Call, draw: Draw) -> Case:
    shape, m = fitting(call.shape), call.shape[-1] // 2

    def inputs() -> Inputs:
        shared = (draw.vector(m, 1.0), draw.vector(m, 1.0)) if call["scaled"] else ()
        uv = draw.activations(shape, call.dtype, call.stride)
        return Inputs((uv,), shared, (draw.normal(*shape[:-1], m).to(uv.dtype),))

    def one_output(function: Callable[..., Tensor]) -> Operation:
        return lambda *inputs: (function(*inputs),)

    return swiglu.swiglu, one_output, inputs, None


def rotary_case(call: Call, draw: Draw) -> Case:
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

    return rotary.rotary, in_heads, inputs, None


def cross_entropy_case(call: Call, draw: Draw, every_token: bool) -> Comparison:
    """Two chunks of tokens, or all with every_token: products in fp64 are slow on many GPUs."""
    d, V, z_loss, smoothing = call.shape[-1], call["vocabulary"], call["z_loss"], call["label_smoothing"]
    cap = float(call.options.get("soft_cap", 0.0))
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
        return cross_entropy.linear_cross_entropy(h, matrix, targets, scale, z_loss, smoothing, cap)[:1]

    # Training needs the loss and gradients. Evaluation needs the losses of tokens, from a pass without gradients.
    def ours(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        return *loss(h, targets, matrix, scale), cross_entropy.token_losses(h, matrix, targets, scale, cap)

    def exact(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        total, *_ = cross_entropy.linear_cross_entropy.formula(h, matrix, targets, scale, z_loss, smoothing, cap)
        with torch.no_grad():
            logits = cross_entropy.soft_capped(h @ matrix.t() if scale is None else h @ matrix.t() * scale, cap)
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
        return total, losses.view(targets.shape)

    # Products and logits are rounded to the activations' dtype, so their sums are no more precise.
    tolerance = MATRIX_TOLERANCE[getattr(torch, call.dtype)]
    return Comparison(str(call), ours, exact, inputs, tolerance, timed=loss, chunks=parts)


def adam_case(call: Call, draw: Draw) -> Case:
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
            hyper = 1e-3, *betas, call["eps"], call["weight_decay"], call["constraint"]
            copy = w.to(torch.bfloat16) if call["copies"] else None
            function(w, g, m1, m2, t, *hyper, scale, taken, copy=copy)
            function(left[0], g, *left[1:], t, *hyper, scale, skipped, copy=copy)
            # The share of a row's elements whose copy is the weight, rounded: 1.
            same = torch.ones_like(w) if copy is None else (copy - w).abs() <= torch.finfo(torch.bfloat16).eps * w.abs()
            return w, m1, m2, *left, same.to(w.dtype).mean(1)

        return step

    def timed(w: Tensor, g: Tensor, m1: Tensor, m2: Tensor, t: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        eps, decay, constraint = call["eps"], call["weight_decay"], call["constraint"]
        adam.adam_rows_(w, g, m1, m2, t, 1e-3, betas[0], betas[1], eps, decay, constraint, None, None)
        return w, m1, m2

    return adam.adam_rows_, stepped, inputs, timed


CASES = {"sphere_step": sphere_step_case, "swiglu": swiglu_case, "rotary": rotary_case, "adam": adam_case}


def fitting(shape: Sequence[int]) -> Sequence[int]:
    """The shape, cut to MOST_ELEMENTS: fewer rows, then fewer tokens of one row. The width stays."""
    first, *rest = shape
    of_one = torch.Size(rest).numel()
    if first * of_one <= MOST_ELEMENTS:
        return shape
    if of_one <= MOST_ELEMENTS or len(rest) < 2:
        return (max(1, MOST_ELEMENTS // of_one), *rest)
    return (1, *fitting(rest))


def times_of_call(call: Call, device: torch.device, compiled: bool) -> tuple[float, float]:
    """Microseconds of the kernel, and of plain PyTorch in its place, for one call: medians of measurements in turn.
    compiled: True if the model's blocks are compiled."""
    case = case_of(call, device, every_token=True)
    ours = case.timed or case.ours
    inputs = case.draw()
    rows = [copied(tensor) for tensor in inputs.rows]  # Adam writes to them

    def passes(operation: Operation) -> None:
        arguments: list[Tensor] = [*rows, *inputs.shared]
        gradients_of(operation(*arguments), arguments, inputs.gradients)

    instead = torch.compile(ours, dynamic=False) if compiled and call.kernel in IN_BLOCKS else ours
    runs = {"triton": lambda: passes(ours), "torch": lambda: passes(instead)}
    found: dict[str, list[float]] = {"triton": [], "torch": []}
    for number in range(1 + (ROUNDS if device.type == "cuda" else 1)):
        for kernels, run in runs.items():
            with dispatch.chosen(kernels):
                seconds = seconds_of(run, device)
            if number:  # the first compiles
                found[kernels].append(seconds)
    kernel, plain = (1e6 * statistics.median(seconds) for seconds in found.values())
    return kernel, plain


def errors_of_attention(call: Call, draw: Draw) -> dict[str, Error]:
    """The errors of the output and of the gradients of q, k and v, by name. All of a call runs. The first and the last
    head of the first and the last row are compared with the formula written out, which has no room for all."""
    B, T, H, D = call.shape
    S, H_kv = call["keys"]
    dtype, scale = getattr(torch, call.dtype), call["scale"]
    # nGPT's unit vectors have the scale sqrt(D), others 1/sqrt(D): scores of about 1 for both.
    size = (scale * D**0.5) ** -0.5
    q, k, v = (
        (width * draw.normal(B, length, heads, D)).to(dtype).requires_grad_()
        for width, length, heads in ((size, T, H), (size, S, H_kv), (1.0, S, H_kv))
    )
    dy = draw.normal(B, T, H, D).to(dtype)
    mask, visible = masks_of(call, draw)
    if draw.device.type == "cuda":
        # Deterministic mode, which would fill new memory with NaN, lets torch choose another kernel.
        del_soon = torch.full((POISONED // 4,), float("nan"), device=draw.device)
        del del_soon
    y = attention.attention(q, k, v, scale, call["causal"], mask)
    ours = [y, *torch.autograd.grad(y, (q, k, v), dy)]

    higher = torch.float64 if dtype == torch.float32 else torch.float32
    group = H // H_kv
    found: dict[str, list[Error]] = {name: [] for name in ("output", "gradient q", "gradient k", "gradient v")}
    for row in sorted({0, B - 1}):
        for head in sorted({0, H_kv - 1}):
            of_q, of_kv = slice(head * group, (head + 1) * group), slice(head, head + 1)
            heads = (of_q, of_q, of_kv, of_kv)
            parts = [x[row : row + 1, :, h].detach().to(higher) for x, h in ((q, of_q), (k, of_kv), (v, of_kv))]
            one_q, one_k, one_v = (part.requires_grad_() for part in parts)
            out = attention.written_out(one_q, one_k, one_v, scale, visible[row % len(visible)])
            exact = [out, *torch.autograd.grad(out, parts, dy[row : row + 1, :, of_q].to(higher))]
            for errors, one, of, expected in zip(found.values(), ours, heads, exact, strict=True):
                errors.append(error_of(one[row : row + 1, :, of], expected, ROUNDINGS * MATRIX_TOLERANCE[dtype]))
    # An error that is not small comes first: NaN is not larger than a number.
    return {name: max(errors, key=lambda e: (not e.is_small, e.relative)) for name, errors in found.items()}


def masks_of(call: Call, draw: Draw) -> tuple[Mask, Tensor]:
    """A mask of the call's kind and shape, and the same mask as a boolean `(B or 1, 1, T or 1, S)`."""
    (B, T, _, D), S = call.shape, call["keys"][0]
    causal = torch.ones(T, S, dtype=torch.bool, device=draw.device)
    causal = (causal.tril() if call["causal"] else causal)[None, None]
    if call["mask"] is None:
        return None, causal
    if call.kernel == "attention":
        visible = draw.uniform(*call["mask"]) < 0.9
        visible[..., 0] = True  # every query sees a key
        return visible, visible
    ends = [T // 3, T // 2, T] if T > 3 else [T]
    place = torch.arange(T, device=draw.device)
    doc_ids = torch.bucketize(place, torch.tensor(ends, device=draw.device), right=True)
    visible = causal & (doc_ids[:, None] == doc_ids)
    kernel = attention.varlen_kernel(draw.device, D, getattr(torch, call.dtype))
    if kernel is not None:
        starts = torch.tensor([row * T + start for row in range(B) for start in (0, *ends[:-1])])
        boundaries = torch.full((B * min(T, ROOM) + 1,), B * T, dtype=torch.int32)
        boundaries[: len(starts)] = starts
        return Packed(kernel, boundaries.to(draw.device), longest=T), visible
    if attention.wants_blocks():

        def seen(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return (s <= t) & (doc_ids[t] == doc_ids[s])

        return attention.blocks(seen, B, T, draw.device), visible
    return visible.expand(B, 1, T, T), visible
