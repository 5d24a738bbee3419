"""Compares an operation with its formula in fp64: outputs and all gradients, over all rows. Times it, too.

New memory is filled with NaN, so that an element that the operation does not write is noticed.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Relative errors, by the dtype of the activations: outputs and gradients in this dtype; fp32 sums over tokens.
MATRIX_TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1.2e-3, torch.float32: 1e-5}
VECTOR_TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-5}
# An element's error in tolerances, relative to its size plus the usual size. The norm of all errors hides one wrong row
# among thousands.
ELEMENT = 30
CHUNKS = 8
SLEEP_CYCLES = 20_000_000  # about 10 ms: time for the host to launch all kernels
CALLS = 5  # in one measurement on a GPU


@dataclass(frozen=True)
class Inputs:
    """The arguments of an operation, and the gradients of its outputs."""

    rows: tuple[Tensor, ...]  # each (B, T, ...) or (rows, d); the formula in fp64 takes a part of them at a time
    shared: tuple[Tensor, ...]  # vectors, matrices and tables that belong to all rows
    gradients: tuple[Tensor, ...]  # dL/d output, for each output; empty for an operation that is not differentiated


Operation = Callable[..., tuple[Tensor, ...]]  # takes Inputs.rows, then Inputs.shared; returns the outputs


@dataclass(frozen=True)
class Comparison:
    """An operation at one size, and its formula."""

    name: str
    ours: Operation
    exact: Operation  # the formula, on fp64
    draw: Callable[[], Inputs]
    shared_tolerance: float  # of the gradients of Inputs.shared
    timed: Operation | None = None  # to be timed, where `ours` does more
    chunks: int = CHUNKS  # the formula in fp64 takes the rows in so many parts, because it needs much memory


class Error(NamedTuple):
    """The distance of an output or a gradient from the formula's."""

    relative: float  # ||ours - exact|| / ||exact||
    worst: float  # the largest |ours - exact| / (|exact| + the root mean square of exact)
    tolerance: float  # of `relative`; ELEMENT times as much of `worst`

    @property
    def is_small(self) -> bool:
        """False for NaN too."""
        return self.relative <= self.tolerance and self.worst <= ELEMENT * self.tolerance


def errors_of(case: Comparison, inputs: Inputs) -> dict[str, Error]:
    """The error of each output, and of each input's gradient, by name."""
    # Copies, because an operation may write to its inputs, and the formula needs them as they were.
    rows = [copied(tensor) for tensor in inputs.rows]
    with uninitialized_memory_is_nan():
        outputs = case.ours(*rows, *inputs.shared)
        gradients = gradients_of(outputs, [*rows, *inputs.shared], inputs.gradients)
    ours = [*outputs, *gradients]

    exact: list[list[Tensor]] = []  # for each part of the rows, outputs and gradients
    parts = [tensor.detach().chunk(case.chunks) for tensor in inputs.rows]
    shared = [in_fp64(tensor) for tensor in inputs.shared]
    for index in range(len(parts[0])):
        part = [in_fp64(tensor[index], whole.requires_grad) for tensor, whole in zip(parts, inputs.rows, strict=True)]
        part_gradients = [g.double() if g.ndim == 0 else g.chunk(case.chunks)[index].double() for g in inputs.gradients]
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
        gradient = index - len(outputs)
        name = f"output {index + 1}" if gradient < 0 else f"gradient {gradient + 1}"
        errors[name] = error_of(tensor, expected, case.shared_tolerance if of_shared else dtype_tolerance)
    return errors


def error_of(ours: Tensor, exact: Tensor, tolerance: float) -> Error:
    """The error of a tensor beside the exact one, of the same shape."""
    ours, exact = ours.detach(), exact.detach()
    difference = ours - exact
    usual = exact.norm() / max(1, exact.numel()) ** 0.5
    worst = (difference.abs() / (exact.abs() + usual)).max()
    return Error(float(difference.norm() / exact.norm()), float(worst), tolerance)


def copied(tensor: Tensor) -> Tensor:
    """A leaf of autograd with the same values and strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def in_fp64(tensor: Tensor, requires_grad: bool | None = None) -> Tensor:
    """A copy in fp64; integers stay integers."""
    needed = tensor.requires_grad if requires_grad is None else requires_grad
    copy = tensor.detach().clone()
    return copy.double().requires_grad_(needed) if copy.is_floating_point() else copy


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of the `inputs` that require one, in their order. gradients: dL/d output of each output."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return torch.autograd.grad(outputs[: len(gradients)], wanted, gradients) if wanted else ()


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


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: on a GPU the device's alone, a mean of CALLS; elsewhere the process's CPU time."""
    if device.type == "cuda":
        return seconds_on_gpu(run, CALLS)
    started = time.process_time()
    run()
    return time.process_time() - started


def seconds_on_gpu(run: Callable[[], object], calls: int) -> float:
    """Seconds that the GPU takes for one call of `run`; a mean of `calls`. The GPU sleeps while the host launches the
    kernels, so that it never waits for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / calls
