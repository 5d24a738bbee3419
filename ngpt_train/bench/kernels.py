"""Checks each fused operation against its formula in fp64, then times it beside plain PyTorch.

The check compares outputs and all gradients, over all rows. New memory is filled with NaN, so that an element that the
operation does not write is noticed. A wrong operation ends the benchmark before anything is timed.

Then three variants take turns: ours, which is what `kernels.dispatch` chooses here; plain PyTorch in eager mode; and,
on a GPU, plain PyTorch under torch.compile. On a GPU the time is the device's alone (`device_time.on_device`), and sets
of inputs take turns, so that none is still in the device's cache. GB/s counts the bytes that the operation must at
least read and write, not those that it does.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.bench.device_time import copy_ceiling, on_device
from ngpt_train.bench.interleaved import Entry, Run, by, interleaved
from ngpt_train.kernels import adam, cross_entropy, dispatch, rotary, sphere_step, swiglu
from ngpt_train.kernels.sphere_step import HiddenState
from ngpt_train.models.layers.rope import rope_table

Shape = tuple[int, int, int]  # d_model, d_mlp, d_head
SHAPES: list[Shape] = [(1024, 4096, 64), (1280, 5120, 64)]  # the paper's 0.5B and 1B
# Relative errors, by the dtype of the activations: of outputs and gradients in that dtype; of fp32 sums over tokens.
MATRIX_TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
VECTOR_TOLERANCE = {torch.bfloat16: 1e-3, torch.float32: 1e-5}
CHUNKS = 8  # The formula in fp64 takes the rows in so many parts, because it needs much memory.
INPUT_SETS = 3


class KernelError(RuntimeError):
    """An operation does not compute its formula."""

    exit_code = 4


@dataclass(frozen=True)
class Sizes:
    """B rows of T tokens, the vocabulary, and the number of timed rounds."""

    B: int
    T: int
    vocab_size: int
    rounds: int


ON_GPU = Sizes(8, 4096, 32_000, 10)
ON_CPU = Sizes(2, 128, 4096, 5)


@dataclass(frozen=True)
class Inputs:
    """The arguments of an operation, and the gradients of its outputs."""

    rows: tuple[Tensor, ...]  # each (B, T, ...) or (rows, d); the formula in fp64 takes a part of them at a time
    shared: tuple[Tensor, ...]  # vectors, matrices and tables that belong to all rows
    gradients: tuple[Tensor, ...]  # dL/d output, for each output; empty for an operation that is not differentiated


Operation = Callable[..., tuple[Tensor, ...]]  # takes Inputs.rows, then Inputs.shared; returns the outputs


@dataclass(frozen=True)
class Case:
    """An operation at one size."""

    name: str
    ours: Operation
    exact: Operation  # the formula, which is given fp64
    plain: Operation  # as one writes it in PyTorch without kernels, for the time
    draw: Callable[[], Inputs]
    tokens: int  # units of the rate in one call: tokens, or rows of a matrix
    bytes_forward: int | None  # that a pass must at least read and write; None where matrix products take the time
    bytes_backward: int | None
    shared_tolerance: float  # of the gradients of Inputs.shared
    compiles: bool = True  # whether torch.compile can fuse `plain`
    forward_alone: bool = True  # whether the forward pass is worth timing by itself


def bench(
    device: torch.device, shapes: Sequence[Shape], sizes: Sizes, say: Callable[[str], None] = print
) -> Iterator[Entry]:
    """Entries of all operations at each shape. Raises KernelError, before the first entry, where one is wrong.

    say: is given lines for the log.
    """
    cases = [case for shape in shapes for case in cases_of(device, shape, sizes)]
    errors = {case.name: check(case, say) for case in cases}
    ceiling = copy_ceiling(device) if device.type == "cuda" else None
    if ceiling is not None:
        say(f"a copy within the device reaches {ceiling:.0f} GB/s")
    for case in cases:
        yield from times(case, errors[case.name], ceiling, device, sizes.rounds)


def cases_of(device: torch.device, shape: Shape, sizes: Sizes) -> list[Case]:
    """All operations at one shape, with activations in bf16 on a GPU and in fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    d, m, d_head = shape
    B, T, V = sizes.B, sizes.T, sizes.vocab_size
    n, element = B * T, dtype.itemsize

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(of)

    def learned(tensor: Tensor) -> Tensor:
        return tensor.requires_grad_()

    def vector(size: int, around: float) -> Tensor:
        return learned(around * (1 + 0.3 * normal(size, of=torch.float32)))

    def sphere_inputs() -> Inputs:
        h = F.normalize(normal(B, T, d, of=torch.float32), dim=-1).to(dtype)
        rows = learned(h), learned(0.1 * normal(B, T, d))
        return Inputs(rows, (vector(d, 0.05),), (normal(B, T, d), normal(B, T, d)))

    def swiglu_inputs(scaled: bool) -> Inputs:
        shared = (vector(m, 1.0), vector(m, 1.0)) if scaled else ()
        return Inputs((learned(normal(B, T, 2 * m)),), shared, (normal(B, T, m),))

    heads = d // d_head
    rope = rope_table(T, d_head, 10_000.0, False, device, torch.float32)

    def rotary_inputs(scaled: bool) -> Inputs:
        shared = (rope.cos, rope.sin, vector(d, 1.0)) if scaled else (rope.cos, rope.sin)
        gradients = tuple(normal(B, T, heads, d_head) for _ in range(3))
        return Inputs((learned(normal(B, T, 3 * d)),), shared, gradients)

    def rotary_step(function: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Operation:
        def step(qkv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
            return function(qkv, cos, sin, rotary.RotaryOptions(heads, heads, False, scale is not None), scale)

        return step

    def head_inputs() -> Inputs:
        targets = torch.randint(V, (B, T), generator=generator, device=device)
        shared = learned(F.normalize(normal(V, d, of=torch.float32), dim=-1)), vector(V, 1.0)
        return Inputs((learned(normal(B, T, d)), targets), shared, (torch.ones((), device=device),))

    def adam_inputs() -> Inputs:
        weight = F.normalize(normal(2 * m, d, of=torch.float32), dim=-1)
        gradient, exp_avg = (0.01 * normal(2 * m, d, of=torch.float32) for _ in range(2))
        exp_avg_sq = 1e-4 * (0.5 + torch.rand(2 * m, d, generator=generator, device=device))
        return Inputs((weight, gradient, exp_avg, exp_avg_sq), (torch.tensor(3.0, device=device),), ())

    def adam_step(function: Callable[..., None]) -> Operation:
        def step(weight: Tensor, gradient: Tensor, m1: Tensor, m2: Tensor, count: Tensor) -> tuple[Tensor, ...]:
            function(weight, gradient, m1, m2, count, 1e-3, 0.9, 0.95, 1e-8, 0.0, True, None, None)
            return weight, m1, m2

        return step

    def on_sphere(function: Callable[..., HiddenState]) -> Operation:
        def step(h: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
            first, second = function(HiddenState(h, h), x, alpha)
            return first, second.view_as(second) if second is first else second  # two outputs, each with its gradient

        return step

    def one_output(function: Callable[..., Tensor]) -> Operation:
        return lambda *inputs: (function(*inputs),)

    def head(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor) -> tuple[Tensor]:
        return cross_entropy.linear_cross_entropy(h, matrix, targets, scale)[:1]

    def exact_head(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor) -> tuple[Tensor]:
        return cross_entropy.linear_cross_entropy.formula(h, matrix, targets, scale)[:1]

    # The Triton kernels sum fp32 values over tokens; plain PyTorch rounds some of these values to `dtype` before.
    by_kernels = dispatch.runs_on_triton("bench", normal(1))
    shared_tolerance = (VECTOR_TOLERANCE if by_kernels else MATRIX_TOLERANCE)[dtype]
    at = f"d {d}"
    row, wide = n * d * element, n * m * element  # bytes of a hidden state and of a half of uv
    sphere_ours, sphere_plain = on_sphere(sphere_step.sphere_step), on_sphere(sphere_step.sphere_step.formula)
    swiglu_ours, swiglu_plain = one_output(swiglu.swiglu), one_output(swiglu.swiglu.formula)
    rotary_ours, rotary_plain = rotary_step(rotary.rotary), rotary_step(rotary.rotary.formula)
    step, step_exact = adam_step(adam.adam_rows_), adam_step(adam.adam_rows_.formula)
    step_plain = adam_step(partial(adam.in_few_passes_, False))
    return [
        # h and x in, h' out; two gradients, h and x in, dh and dx out.
        Case(f"sphere_step, {at}", sphere_ours, sphere_plain, sphere_plain, sphere_inputs, n,
             3 * row, 6 * row, shared_tolerance),
        # u, v in, y out; u, v, dy in, du, dv out.
        Case(f"swiglu with scales, {at}", swiglu_ours, swiglu_plain, swiglu_plain, lambda: swiglu_inputs(True), n,
             3 * wide, 5 * wide, shared_tolerance),
        Case(f"swiglu, {at}", swiglu_ours, swiglu_plain, swiglu_plain, lambda: swiglu_inputs(False), n,
             3 * wide, 5 * wide, shared_tolerance),
        # q, k in and out; dq, dk, dv in and out, and q, k in where they are normalised.
        Case(f"rotary of nGPT, {at}", rotary_ours, rotary_plain, rotary_plain, lambda: rotary_inputs(True), n,
             4 * row, 8 * row, shared_tolerance),
        Case(f"rotary of GPT, {at}", rotary_ours, rotary_plain, rotary_plain, lambda: rotary_inputs(False), n,
             4 * row, 6 * row, shared_tolerance),
        # Products and logits are rounded to the activations' dtype, so sums of them are no more precise than that.
        Case(f"linear_cross_entropy, {at}", head, exact_head, plain_head, head_inputs, n,
             None, None, MATRIX_TOLERANCE[dtype], forward_alone=False),
        # 28 bytes a parameter, as counted in kernels/adam.py.
        Case(f"adam_rows_, {at}", step, step_exact, step_plain, adam_inputs, 2 * m,
             28 * 2 * m * d, None, shared_tolerance, compiles=False),
    ]  # fmt: skip


def plain_head(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor) -> tuple[Tensor]:
    """The summed cross-entropy without kernels: the product in h's dtype, all logits at once in fp32.

    h `(B, T, d_model)`, targets `(B, T)`, matrix `(V, d_model)`, scale `(V,)`.
    """
    logits = F.linear(h, matrix.to(h.dtype)).float() * scale  # (B, T, V)
    return (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"),)


def check(case: Case, say: Callable[[str], None]) -> float:
    """The largest relative error of an output or a gradient. Raises KernelError where one exceeds its tolerance."""
    found = relative_errors(case, case.draw())
    text = ", ".join(f"{name} {error:.1e}" for name, (error, _) in found.items())
    # Written so that NaN is wrong.
    wrong = [name for name, (error, tolerance) in found.items() if not error <= tolerance]
    if wrong:
        limits = ", ".join(f"{name} {found[name][1]:.0e}" for name in wrong)
        raise KernelError(f"{case.name} is wrong: relative errors against fp64: {text}\n  Allowed: {limits}")
    say(f"{case.name}: relative errors {text}")
    return max(error for error, _ in found.values())


def relative_errors(case: Case, inputs: Inputs) -> dict[str, tuple[float, float]]:
    """||ours - exact|| / ||exact|| and its tolerance, by name: of each output, and of each input's gradient."""
    # Copies, because an operation may write to its inputs, and the formula needs them as they were.
    rows = [copied(tensor) for tensor in inputs.rows]
    with uninitialized_memory_is_nan():
        outputs = case.ours(*rows, *inputs.shared)
        gradients = gradients_of(outputs, [*rows, *inputs.shared], inputs.gradients)
    ours = [*outputs, *gradients]

    exact: list[list[Tensor]] = []  # for each part of the rows, outputs and gradients
    parts = [tensor.detach().chunk(CHUNKS) for tensor in inputs.rows]
    shared = [in_fp64(tensor) for tensor in inputs.shared]
    for index in range(len(parts[0])):
        part = [in_fp64(tensor[index], whole.requires_grad) for tensor, whole in zip(parts, inputs.rows, strict=True)]
        part_gradients = [g.double() if g.ndim == 0 else g.chunk(CHUNKS)[index].double() for g in inputs.gradients]
        out = case.exact(*part, *shared)
        exact.append([*(o.detach() for o in out), *gradients_of(out, [*part, *shared], part_gradients)])

    dtype_tolerance = MATRIX_TOLERANCE[next(t.dtype for t in inputs.rows if t.is_floating_point())]
    n_rows = sum(tensor.requires_grad for tensor in inputs.rows)
    errors = {}
    for index, tensor in enumerate(ours):
        of_shared = index >= len(outputs) + n_rows
        of_parts = [values[index] for values in exact]
        summed = of_shared or tensor.ndim == 0  # over the rows: a gradient of `shared`, or the loss
        expected = torch.stack(of_parts).sum(0) if summed else torch.cat(of_parts)
        error = float((tensor.detach() - expected).norm() / expected.norm())
        gradient = index - len(outputs)
        name = f"output {index + 1}" if gradient < 0 else f"gradient {gradient + 1}"
        errors[name] = error, case.shared_tolerance if of_shared else dtype_tolerance
    return errors


def copied(tensor: Tensor) -> Tensor:
    """A leaf of autograd with the same values."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def in_fp64(tensor: Tensor, requires_grad: bool | None = None) -> Tensor:
    """A copy in fp64; integers stay integers."""
    needed = tensor.requires_grad if requires_grad is None else requires_grad
    copy = tensor.detach().clone()
    return copy.double().requires_grad_(needed) if copy.is_floating_point() else copy


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Of those `inputs` that require one, in their order. gradients: dL/d output, of each output."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return torch.autograd.grad(outputs, wanted, gradients) if wanted else ()


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    """While the body runs, torch.empty fills new memory with NaN, so that an element that is not written is noticed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Deterministic mode warns of operations without a deterministic form.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def times(case: Case, error: float, ceiling: float | None, device: torch.device, rounds: int) -> Iterator[Entry]:
    """Entries of the forward pass and of both passes together, for each variant.

    error: of `ours`, from `check`. ceiling: GB/s of a copy on this device, None where it was not measured.
    """
    on_gpu = device.type == "cuda"
    sets = [case.draw() for _ in range(INPUT_SETS if on_gpu else 1)]
    variants = {"ours": case.ours, "eager": case.plain}
    if on_gpu and case.compiles:
        torch._dynamo.reset()
        variants["compiled"] = torch.compile(case.plain, dynamic=False)
    passes: list[tuple[str, bool, int | None]] = []  # name, whether it includes the backward pass, bytes
    if case.forward_alone:
        passes.append(("forward", False, case.bytes_forward))
    if sets[0].gradients:
        n_bytes = None if case.bytes_forward is None else case.bytes_forward + (case.bytes_backward or 0)
        passes.append(("forward and backward", True, n_bytes))
    for name, backward, n_bytes in passes:
        runs = {who: over_all_sets(case, variant, sets, backward) for who, variant in variants.items()}
        label = f"{case.name}, {name}" if case.bytes_backward else case.name
        measure = on_device if on_gpu else by(time.process_time)
        for entry in interleaved(runs, "eager", rounds, "rows", measure):
            seconds = 1e-3 * entry.median_ms / len(sets)  # of one call
            gb_per_s = None if n_bytes is None or not on_gpu else n_bytes / seconds / 1e9
            yield replace(
                entry,
                name=f"{label}: {entry.name}",
                relative_to=f"{label}: eager",
                median_ms=1e3 * seconds,
                error=error if entry.name == "ours" else None,
                gb_per_s=gb_per_s,
                of_ceiling=None if gb_per_s is None or ceiling is None else gb_per_s / ceiling,
            )


def over_all_sets(case: Case, operation: Operation, sets: Sequence[Inputs], backward: bool) -> Run:
    """A run that calls the operation once on each set of inputs; its units are the tokens of all calls."""

    def run() -> float:
        for inputs in sets:
            arguments = [*inputs.rows, *inputs.shared]
            with torch.set_grad_enabled(backward):
                outputs = operation(*arguments)
            if backward:
                gradients_of(outputs, arguments, inputs.gradients)
        return float(case.tokens * len(sets))

    return run
