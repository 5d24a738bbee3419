"""Times a kernel, forward and backward, beside plain PyTorch on the same inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ngpt_train.kernels import dispatch
from ngpt_train.kernels.check.calls import Call
from ngpt_train.kernels.check.cases import case_of
from ngpt_train.kernels.check.deviation import Operation, copied, gradients_of

SLEEP_CYCLES = 20_000_000  # about 10 ms: time for the host to launch all kernels
CALLS = 5  # in one measurement on a GPU
ROUNDS = 5
# Operations inside of blocks. Where blocks are compiled, plain PyTorch is compiled for the comparison.
IN_BLOCKS = ("sphere_step", "swiglu", "rotary")


def times_of_call(call: Call, device: torch.device, compiled: bool) -> tuple[float, float]:
    """Microseconds of the kernel, and of plain PyTorch in its place, for one call: medians of measurements in turn.

    compiled: True if the model's blocks are compiled.
    """
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


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: on a GPU the device's alone, a mean of CALLS; elsewhere the process's CPU time."""
    return on_device(run, CALLS) if device.type == "cuda" else on_cpu(run)


def on_device(run: Callable[[], object], calls: int) -> float:
    """Seconds that the GPU takes for one call of `run`; a mean of `calls`.

    The GPU sleeps while the host launches the kernels, so that it never waits for the host.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / calls


def on_cpu(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started
