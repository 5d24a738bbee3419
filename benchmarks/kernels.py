"""Checks each fused operation against its formula in fp64, then times it beside plain PyTorch. Needs torch alone.

    python -m benchmarks.kernels [--widths 1024,1280] [--device cpu] [--out FILE]

The check compares outputs and all gradients, over all rows. New memory is filled with NaN, so that an element that the
operation does not write is noticed. A wrong operation ends the benchmark before anything is timed.

Then three variants take turns: ours, which is what `kernels.dispatch` chooses here; plain PyTorch in eager mode; and,
on a GPU, plain PyTorch under torch.compile. On a GPU the time is the device's alone, and sets of inputs take turns, so
that none is still in the device's cache. GB/s counts the bytes that the operation must at least read and write, not
those that it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Entry, Run, WrongResultError, default_device, interleaved, main, on_device
from ngpt_train.kernels import adam, dispatch
from ngpt_train.kernels.check.calls import Call, name_of, of_adam
from ngpt_train.kernels.check.cases import case_of
from ngpt_train.kernels.check.formula_comparison import Comparison, Inputs, Operation, errors_of, gradients_of

D_HEAD = 64
INPUT_SETS = 3


@dataclass(frozen=True)
class Sizes:
    """B rows of T tokens, the vocabulary, and the number of timed rounds."""

    B: int
    T: int
    vocab_size: int
    rounds: int


ON_GPU = Sizes(8, 4096, 32_000, 10)
ON_CPU = Sizes(2, 128, 4096, 5)


@dataclass(frozen=True, kw_only=True)
class Case(Comparison):
    """An operation at one size, with what its times need."""

    plain: Operation  # as one writes it in PyTorch without kernels, for the time
    tokens: int  # units of the rate in one call: tokens, or rows of a matrix
    bytes_forward: int | None  # that a pass must at least read and write; None where matrix products take the time
    bytes_backward: int | None
    compiles: bool = True  # whether torch.compile can fuse `plain`
    forward_alone: bool = True  # whether the forward pass is worth timing by itself


def bench(widths: str, device: str) -> Iterator[Entry]:
    """Entries of all operations at each d_model of `widths`. Raises WrongResultError before any of them."""
    on = torch.device(device)
    sizes = ON_GPU if on.type == "cuda" else ON_CPU
    cases = [case for width in widths.split(",") for case in cases_of(on, int(width), sizes)]
    errors = {case.name: check(case) for case in cases}
    ceiling = copy_ceiling(on) if on.type == "cuda" else None
    for case in cases:
        yield from times(case, errors[case.name], ceiling, on, sizes.rounds)


def cases_of(device: torch.device, d: int, sizes: Sizes) -> list[Case]:
    """All operations at one d_model, with activations in bf16 on a GPU and in fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    m, B, T, V = 4 * d, sizes.B, sizes.T, sizes.vocab_size
    n, element = B * T, dtype.itemsize
    by_kernels = dispatch.runs_on_triton("bench", torch.empty(1, dtype=dtype, device=device))

    def case(name: str, call: Call, tokens: int, forward: int | None, backward: int | None, **more: Any) -> Case:
        found = case_of(call, device, by_kernels, every_token=True)
        needs = {"plain": found.exact, "tokens": tokens, "bytes_forward": forward, "bytes_backward": backward}
        return Case(**vars(found) | {"name": f"{name}, d {d}"} | needs | more)

    def call(kernel: str, *shape: int, **options: Any) -> Call:
        return Call.of(kernel, torch.empty(shape, dtype=dtype, device="meta"), **options)

    row, wide = n * d * element, n * m * element  # bytes of a hidden state and of a half of uv
    heads = d // D_HEAD
    name = name_of(torch.empty(0, dtype=dtype))
    rotary = {"of_rows": False}
    adam_rows = of_adam(2 * m, d, "sphere", False, (0.9, 0.95), 1e-8, 0.0)
    return [
        # h and x in, h' out; two gradients, h and x in, dh and dx out.
        case("sphere_step", call("sphere_step", B, T, d, h=name, alpha="float32"), n, 3 * row, 6 * row),
        # u, v in, y out; u, v, dy in, du, dv out.
        case("swiglu with scales", call("swiglu", B, T, 2 * m, scaled=True), n, 3 * wide, 5 * wide),
        case("swiglu", call("swiglu", B, T, 2 * m, scaled=False), n, 3 * wide, 5 * wide),
        # q, k in and out; dq, dk, dv in and out, and q, k in where they are normalised.
        case("rotary of nGPT", call("rotary", B, T, 3 * d, options=[heads, heads, False, True], scaled=True, **rotary),
             n, 4 * row, 8 * row),
        case("rotary of GPT", call("rotary", B, T, 3 * d, options=[heads, heads, False, False], scaled=False, **rotary),
             n, 4 * row, 6 * row),
        case("linear_cross_entropy", call("linear_cross_entropy", B, T, d, vocabulary=V, matrix="float32", scaled=True,
             z_loss=0.0, label_smoothing=0.0), n, None, None, plain=plain_head, forward_alone=False),
        # 28 bytes a parameter, as counted in kernels/adam.py.
        case("adam_rows_", adam_rows, 2 * m, 28 * 2 * m * d, None, plain=plain_adam, compiles=False),
    ]  # fmt: skip


def plain_adam(
    weight: Tensor, gradient: Tensor, m1: Tensor, m2: Tensor, count: Tensor, *_: Tensor
) -> tuple[Tensor, ...]:
    """A step of torch's fused Adam and the projection; arguments as of the kernel's case."""
    adam.in_few_passes_(False, weight, gradient, m1, m2, count, 1e-3, 0.9, 0.95, 1e-8, 0.0, "sphere", None, None)
    return weight, m1, m2


def plain_head(h: Tensor, targets: Tensor, matrix: Tensor, scale: Tensor) -> tuple[Tensor]:
    """The summed cross-entropy without kernels: the product in h's dtype, all logits at once in fp32.

    h `(B, T, d_model)`, targets `(B, T)`, matrix `(V, d_model)`, scale `(V,)`.
    """
    logits = F.linear(h, matrix.to(h.dtype)).float() * scale  # (B, T, V)
    return (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"),)


def copy_ceiling(device: torch.device) -> float:
    """GB/s, reads and writes together, of a large copy within the GPU, which no kernel exceeds by much."""
    # Random values, because some devices move zeros faster.
    source = torch.empty(2**31, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)

    def copy() -> float:
        target.copy_(source)
        return 2.0 * source.nbytes

    (entry,) = interleaved({"copy": copy}, "copy", 5, "bytes", on_device(device))
    assert entry.rate is not None
    print(f"a copy within the device reaches {entry.rate / 1e9:.0f} GB/s", flush=True)
    return entry.rate / 1e9


def check(case: Case) -> float:
    """The largest relative error of an output or a gradient. Raises WrongResultError where one is too large."""
    found = errors_of(case, case.draw())
    text = ", ".join(f"{name} {error.relative:.1e}" for name, error in found.items())
    wrong = {name: error for name, error in found.items() if not error.is_small}
    if wrong:
        limits = ", ".join(
            f"{name} {error.tolerance:.0e}, worst element {error.worst:.1e}" for name, error in wrong.items()
        )
        raise WrongResultError(f"{case.name} is wrong: relative errors against fp64: {text}\n  Allowed: {limits}")
    print(f"{case.name}: relative errors {text}", flush=True)
    return max(error.relative for error in found.values())


def times(case: Case, error: float, ceiling: float | None, device: torch.device, rounds: int) -> Iterator[Entry]:
    """Entries of the forward pass and of both passes together, for each variant.

    error: of `ours`, from `check`. ceiling: GB/s of a copy on this device, None where it was not measured.
    """
    on_gpu = device.type == "cuda"
    sets = [case.draw() for _ in range(INPUT_SETS if on_gpu else 1)]
    variants = {"ours": case.timed or case.ours, "eager": case.plain}
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
        for entry in interleaved(runs, "eager", rounds, "rows", on_device(device), f"{label}: "):
            one_call = replace(entry, median_ms=entry.median_ms / len(sets))
            if entry.name == f"{label}: ours":
                one_call.more["error"] = error
            if n_bytes is not None and ceiling is not None:
                gb_per_s = n_bytes / one_call.median_ms / 1e6
                one_call.more.update(gb_per_s=gb_per_s, of_ceiling=gb_per_s / ceiling)
            yield one_call


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


if __name__ == "__main__":
    sys.exit(main(__doc__, bench, overrides=False, widths="1024,1280", device=default_device()))
