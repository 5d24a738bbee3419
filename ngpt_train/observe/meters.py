"""Measurements of a run: tokens per second, MFU, seconds per step, memory, and a profiler trace of a few steps."""

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from ngpt_train.training.loop import Hook, TrainingRun

# Peak FLOP/s of dense matrix products in bf16, and in fp16 where fp32 accumulates. The key is the full name from
# torch.cuda, because variants of one chip differ by up to a third, and a slice (MIG) is slower than the chip. Sources:
# the vendor's data sheets of A100, H100 (SXM5, PCIe, NVL), H200 (SXM, NVL), GH200, HGX B200, GB200 NVL72, L4 and L40S,
# whose figures "with sparsity" are twice these; for the RTX 4090 the Ada whitepaper, with fp32 accumulation.
DENSE_PEAKS = [
    (r"(NVIDIA )?A100-SXM4-[48]0GB", 312e12),
    (r"(NVIDIA )?A100-PCIE-40GB", 312e12),
    (r"NVIDIA A100 80GB PCIe", 312e12),
    (r"NVIDIA H100 80GB HBM3", 989.4e12),
    (r"NVIDIA H100 PCIe", 756e12),
    (r"NVIDIA H100 NVL", 835e12),
    (r"NVIDIA H200", 989.4e12),
    (r"NVIDIA H200 NVL", 835e12),
    (r"NVIDIA GH200 (120GB|144G HBM3e|480GB)", 989.4e12),
    (r"NVIDIA B200", 2250e12),
    (r"NVIDIA GB200", 2500e12),
    (r"NVIDIA L4", 121e12),
    (r"NVIDIA L40S", 362e12),
    (r"NVIDIA GeForce RTX 4090", 165.2e12),
]


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device's matrix products in `dtype`; None if it is not known. Only bf16 and fp16, which agree,
    are listed: the peak of fp32 products depends on whether TF32 is on."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for name, peak in DENSE_PEAKS if re.fullmatch(name, device_name)), None)


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory since the start, in 1e9 bytes: of the GPU's tensors, or on a CPU of this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Meter:
    """Averages the host's seconds over the steps since the last reading.

    flops_per_token: of forward and backward, non-causal convention (`model.flops_per_token(context)`).
    device, dtype: of the matrix products, for the peak in MFU.
    """

    def __init__(self, flops_per_token: float, world_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.flops_per_token = flops_per_token
        self.device = device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = peak_flops(name, dtype)
        self.peak = None if peak is None else peak * world_size  # FLOP/s of all ranks
        self._steps: list[tuple[float, float, int]] = []  # arguments of `step` since the last reading

    def step(self, seconds: float, data_seconds: float, tokens: int) -> None:
        """Adds a step. seconds: of the whole step, its wait for data (data_seconds) included. tokens: of all ranks."""
        self._steps.append((seconds, data_seconds, tokens))

    def read(self) -> dict[str, float | None]:
        """The metrics of the steps since the last call; there must be one. Starts the next window.

        tokens_per_s: of all ranks. step_time, data_time: seconds per step. mfu: a fraction, None if the peak is not
        known. memory_gb: the peak of this rank since the start.
        """
        steps, self._steps = self._steps, []
        assert steps, "nothing measured since the last reading"
        seconds, data_seconds, tokens = map(sum, zip(*steps, strict=True))
        tokens_per_s = tokens / seconds
        return {
            "tokens_per_s": tokens_per_s,
            "mfu": None if self.peak is None else self.flops_per_token * tokens_per_s / self.peak,
            "step_time": seconds / len(steps),
            "data_time": data_seconds / len(steps),
            "memory_gb": peak_memory_gb(self.device),
        }


class Profiler(Hook):
    """Writes the trace of steps 4 to 6 of this start to `directory/rank_<r>.json`. Perfetto and chrome://tracing open
    the trace. It leaves out the first steps, which compile and warm up."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def around(self, run: TrainingRun) -> Iterator[None]:
        def write(profiler: profile) -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._directory / f"rank_{run.state.world.rank}.json"))

        steps = schedule(wait=2, warmup=1, active=3, repeat=1)
        with profile(schedule=steps, on_trace_ready=write) as self._profile:
            yield

    def after_step(self, run: TrainingRun) -> None:
        self._profile.step()
