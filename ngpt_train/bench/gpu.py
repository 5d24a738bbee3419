"""Everything that only a GPU can tell, in one command of bounded length; torch and triton alone are needed.

    python -m ngpt_train bench gpu --budget 520 --out DIR          # one GPU since Ampere, in under 9 minutes
    python -m ngpt_train.bench.gpu --device cpu --scale debug --budget 60

In this order: versions, ceilings (copies and matrix products), attention, kernels (right, then fast), steps of GPT and
nGPT in turn. What the budget has no time for is skipped, and said to be. DIR receives bench.json, written after each
part, and caches.tar.gz, what torch.compile and Triton compiled: where it lies in DIR already, that is not compiled
again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ngpt_train.bench import attention, gpu_steps, kernels
from ngpt_train.bench.device_time import copy_ceiling, product_seconds
from ngpt_train.bench.gpu_steps import Measured
from ngpt_train.bench.gpu_tables import kernel_line, print_tables, step_line
from ngpt_train.kernels import dispatch
from ngpt_train.training.checkpoint import write_json
from ngpt_train.training.provenance import git_commit

RESERVE = 15.0  # seconds of the budget that the caches and the table take
ATTENTION_SHARE, KERNELS_SHARE = 0.08, 0.25  # of the budget, at the most
TOKENS = 32_768  # of the products that are timed: a step of 8 rows of 4096
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
MFU = (
    "FLOPs per token * tokens/s / peak of dense bf16 products; FLOPs per token: 6 weights + 12 L d T (mfu), "
    "6 weights + 6 L d T (mfu_causal); null where the peak is not known"
)
SCALES: dict[str, tuple[list[kernels.Shape], kernels.Sizes]] = {
    "paper": (kernels.SHAPES, kernels.ON_GPU),
    "debug": ([(64, 256, 32)], kernels.Sizes(2, 64, 512, 3)),
}
ATTENTION = {"paper": attention.ON_GPU, "debug": [(2, 2, 64, 32)]}


class Protocol:
    """What is found, part by part; bench.json always holds what there is so far."""

    def __init__(self, scale: str, device: torch.device, budget: float, out: Path) -> None:
        self.scale, self.device, self.out = scale, device, out
        self.started = time.monotonic()
        self.deadline = self.started + budget - min(RESERVE, budget / 4)
        self.budget = budget
        on_gpu = device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})"
        self.ceiling: float | None = None  # GB/s
        self.steps: list[Measured] = []
        self.found: dict[str, Any] = {"what": "gpu", "scale": scale, "is_gpu": on_gpu, "mfu": MFU}
        self.found |= {"entries": [], "skipped": [], "problems": []}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)

    def skip(self, what: str) -> None:
        self.say(f"{what}: skipped (budget)")
        self.found["skipped"].append(what)

    def problem(self, text: str) -> None:
        self.say(f"FAILED: {text}")
        self.found["problems"].append(text)

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def write(self) -> None:
        write_json(self.out / "bench.json", self.found)

    def versions(self) -> None:
        about = {
            "device": self.device_name,
            "commit": git_commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version_of("triton"),
            "cudnn": torch.backends.cudnn.version(),
            "driver, SM clock, power": driver(),
            "kernels": dispatch.why_no_triton() or "triton",
        }
        self.found |= about
        for name, value in about.items():
            self.say(f"{name}: {value}")
        if self.device.type != "cuda":
            self.say("THIS IS NOT A GPU: nothing below says anything about one")

    def ceilings(self) -> None:
        if self.device.type != "cuda":
            return
        self.ceiling = copy_ceiling(self.device)
        self.say(f"copy within the device: {self.ceiling:.0f} GB/s")
        n = 8192
        flops = 2 * n**3 / product_seconds(self.device, n, n, n)
        self.say(f"bf16 product of {n}^3: {flops / 1e12:.0f} TFLOP/s")
        self.found["ceilings"] = {"copy_gb_per_s": self.ceiling, "product_tflop_per_s": flops / 1e12}
        for size in ("0.5b", "1b"):
            self.products(size)

    def products(self, size: str) -> None:
        """The matrix products of a step. W_o and W_down are stored transposed, as d_model is what they write."""
        d, n_layers, _, m, vocab = gpu_steps.SIZES[size]
        shapes = [("qkv", d, 3 * d, False, n_layers), ("o", d, d, True, n_layers), ("o as nn.Linear", d, d, False, 0)]
        shapes += [
            ("gate and up", d, 2 * m, False, n_layers),
            ("down", m, d, True, n_layers),
            ("head", d, vocab, False, 1),
        ]
        total = 0.0
        for name, d_in, d_out, transposed, times in shapes:
            if self.late():
                self.skip(f"products of {size}, {name}")
                return
            seconds = {
                "forward": product_seconds(self.device, TOKENS, d_in, d_out, "nn" if transposed else "nt"),
                "by input": product_seconds(self.device, TOKENS, d_out, d_in, "nt" if transposed else "nn"),
                "by weight": product_seconds(
                    self.device, *((d_in, TOKENS, d_out) if transposed else (d_out, TOKENS, d_in)), "tn"
                ),
            }
            total += times * sum(seconds.values())
            rates = {which: 2e-12 * TOKENS * d_in * d_out / taken for which, taken in seconds.items()}
            self.found["ceilings"][f"{size} {name}, TFLOP/s"] = rates
            self.say(
                f"{size} {name}: " + ", ".join(f"{which} {rate:.0f}" for which, rate in rates.items()) + " TFLOP/s"
            )
        self.found["ceilings"][f"{size} products, ms"] = 1e3 * total
        self.say(f"{size}: products of a step of {TOKENS} tokens: {1e3 * total:.1f} ms")

    def attention(self) -> None:
        until = min(self.deadline, time.monotonic() + ATTENTION_SHARE * self.budget)
        for shape in ATTENTION[self.scale]:
            if time.monotonic() > until:
                self.skip(f"attention, {shape[2]} tokens")
                continue
            for entry in attention.bench(self.device, [shape], 5, self.say):
                assert entry.rate is not None
                self.say(f"{entry.name}: {1e3 * entry.median_ms:.0f} us, {entry.rate / 1e12:.3g} TFLOP/s")
                self.found["entries"].append(entry.json())

    def kernels(self) -> None:
        """Raises KernelError where one is wrong: times of it would mean nothing."""
        until = min(self.deadline, time.monotonic() + KERNELS_SHARE * self.budget)
        shapes, sizes = SCALES[self.scale]
        cases = [case for shape in shapes for case in kernels.cases_of(self.device, shape, sizes)]
        errors = {}
        for case in cases:
            if time.monotonic() > until:
                self.skip(f"check of {case.name}")
            else:
                errors[case.name] = kernels.check(case, self.say)
        for case in cases:
            if time.monotonic() > until:
                self.skip(f"times of {case.name}")
            elif case.name in errors:
                for entry in kernels.times(case, errors[case.name], self.ceiling, self.device, sizes.rounds):
                    self.say(kernel_line(entry))
                    self.found["entries"].append(entry.json())

    def rows(self) -> None:
        for row in gpu_steps.ROWS[self.scale]:
            name = f"steps of {row.name}"
            if time.monotonic() + gpu_steps.seconds_needed(row, self.scale, self.device_name) > self.deadline:
                self.skip(name)
                continue
            with self.going_on(name):
                measured = gpu_steps.run_row(row, self.device.type, self.device_name, self.deadline, self.say)
                if measured is None:
                    self.skip(name)
                for one in measured or ():
                    self.steps.append(one)
                    self.found["entries"].append(one.json())
                    self.say(step_line(one))
                    for problem in one.problems:
                        self.problem(f"{one.row}, {one.variant}: {problem}")
            self.write()

    @contextlib.contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """An error ends one part, not the others: time on a GPU is short."""
        try:
            yield
        except kernels.KernelError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.problem(f"{what}: {type(error).__name__}: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where a part failed or found a run wrong, 4 where a kernel is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=520, help="seconds (default: 520)")
    parser.add_argument("--out", type=Path, default=Path("bench_gpu"), help="directory (default: bench_gpu)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--scale", default="paper", choices=tuple(SCALES))
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --scale debug tries the same on a CPU")
    arguments.out.mkdir(parents=True, exist_ok=True)
    protocol = Protocol(arguments.scale, torch.device(arguments.device), arguments.budget, arguments.out)
    with compile_caches(arguments.out / "caches.tar.gz"):
        code = run(protocol)
    print_tables(protocol.device_name, protocol.found, protocol.steps)
    protocol.say(f"{arguments.out / 'bench.json'}: {'FAILED' if code else 'all checks passed'}")
    return code


def run(protocol: Protocol) -> int:
    parts: list[Callable[[], None]] = [protocol.versions, protocol.ceilings]
    parts += [protocol.attention, protocol.kernels, protocol.rows]
    code = 0
    for part in parts:
        try:
            with protocol.going_on(part.__name__):
                part()
        except kernels.KernelError as error:
            protocol.problem(str(error))
            code = error.exit_code
        protocol.write()
        if code:
            break
    return code or int(bool(protocol.found["problems"]))


@contextlib.contextmanager
def compile_caches(archive: Path) -> Iterator[None]:
    """What is compiled goes to a directory of its own, from and to `archive`."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory() as directory:
        if archive.exists():
            with tarfile.open(archive) as stored:
                stored.extractall(directory, filter="data")
        os.environ |= {name: str(Path(directory, part)) for name, part in CACHES.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            with tarfile.open(archive, "w:gz", compresslevel=1) as stored:
                for part in CACHES.values():
                    if Path(directory, part).exists():
                        stored.add(Path(directory, part), part)


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """As the driver's own tool says; nothing is set."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
