"""What benchmarks share: runs that do the same take turns, so that changes of the machine's speed fall on all alike;
each result is a line and, with `--out FILE`, JSON. It needs torch alone."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ngpt_train.config.places import check_file
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.files import write_json
from ngpt_train.kernels.check.formula_comparison import seconds_on_gpu
from ngpt_train.kernels.check.kernel_findings import nvidia_smi, triton_version
from ngpt_train.models import Decoder
from ngpt_train.observe.meters import peak_flops

Run = Callable[[], float]  # does the work once; returns its number of units (tokens, rows, bytes)
Measure = Callable[[Run], tuple[float, float]]  # gives the seconds and units of a run

HEAD = f"{'':<58} {'ratio':>6}  {'spread':>15}  {'median':>12}  rate"
CALLS = 5  # of the run in one measurement by the GPU's own clock
# What a benchmark measures beside times, by its name in the JSON, and how a line says it.
SAID = {
    "mfu": "MFU {:.1%}",
    "mfu_causal": "causal {:.1%}",
    "memory_gb": "{:.1f} GB at the most",
    "gb_per_s": "{:.0f} GB/s",
    "of_ceiling": "{:.0%} of a copy's",
    "activations_mb": "{:.0f} MB of activations",
    "error": "error {:.1e}",
    "losses": "loss {0[0]:.3f} -> {0[1]:.3f}",
    "memory_mb": "{0[0]:.0f} MB resident after a tenth, {0[1]:.0f} MB at the end",
}


class WrongResultError(RuntimeError):
    """What was to be timed computes something else: its time would mean nothing."""

    exit_code = 4


class Result(Protocol):
    """What `main` prints and writes."""

    def line(self) -> str: ...

    def json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Entry:
    """The times of one run."""

    name: str
    median_ms: float
    spread: tuple[float, float]  # quartiles of the ratio
    ratio: float  # time over that of `relative_to` in the same round, for as many units; median over rounds
    relative_to: str  # the name of another entry
    rate: float | None = None  # units per second
    unit: str | None = None  # of the rate, "tokens/s" for example
    more: dict[str, Any] = field(default_factory=dict)  # also printed: SAID's. None where it could not be measured

    def json(self) -> dict[str, Any]:
        """All numbers by name."""
        own = asdict(self)
        return own | own.pop("more")

    def line(self) -> str:
        """A line of the table below HEAD."""
        said = []
        if self.rate is not None:
            size, letter = next(x for x in ((1e12, "T"), (1e6, "M"), (1, "")) if self.rate >= x[0] or x[0] == 1)
            said.append(f"{self.rate / size:.4g} {letter}{self.unit}")
        said += [text.format(self.more[name]) for name, text in SAID.items() if self.more.get(name) is not None]
        spread = f"{self.spread[0]:.4g} to {self.spread[1]:.4g}"
        return f"{self.name:<58} {self.ratio:>6.2f}  {spread:>15}  {self.median_ms:>9.4g} ms  {', '.join(said)}"


@dataclass(frozen=True)
class Part:
    """A part of what was timed, without the parts that it calls."""

    name: str
    ms: float
    of_all: float  # 0 to 1
    calls: int

    def line(self) -> str:
        return f"  {self.name[:56]:<56} {self.of_all:>6.1%}  {self.calls:>9} calls  {self.ms:>9.4g} ms"

    def json(self) -> dict[str, Any]:
        return asdict(self)


def by(clock: Callable[[], float]) -> Measure:
    """Measures a run by `clock`, which gives seconds."""

    def measure(run: Run) -> tuple[float, float]:
        started = clock()
        units = run()
        return clock() - started, units

    return measure


WALL = by(time.perf_counter)


def elapsed(device: torch.device) -> Measure:
    """Wall-clock time until the GPU has finished; on a CPU the process's CPU time, because other processes disturb
    wall-clock time."""

    def synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return by(time.process_time if device.type == "cpu" else synchronized)


def on_device(device: torch.device) -> Measure:
    """The GPU's own time, a mean of CALLS calls; on a CPU as `elapsed`."""

    def measure(run: Run) -> tuple[float, float]:
        units: list[float] = []
        seconds = seconds_on_gpu(lambda: units.append(run()), CALLS)
        return seconds, sum(units) / CALLS

    return elapsed(device) if device.type == "cpu" else measure


def interleaved(
    runs: Mapping[str, Run], relative_to: str, rounds: int, unit: str, measure: Measure, of: str = ""
) -> list[Entry]:
    """Runs each of `runs` once in every round; the first of rounds + 1 does not count. An entry for each run.

    relative_to: the run that the others are compared with. unit: of what runs return. of: comes before the names.
    """
    seconds_per_unit: dict[str, list[float]] = {name: [] for name in runs}
    units: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            seconds, units[name] = measure(run)
            if number:
                seconds_per_unit[name].append(seconds / units[name])
    entries = []
    for name, taken in seconds_per_unit.items():
        ratios = [one / other for one, other in zip(taken, seconds_per_unit[relative_to], strict=True)]
        median = statistics.median(taken)
        spread, ratio = quartiles(ratios), statistics.median(ratios)
        median_ms, relative = 1e3 * median * units[name], f"{of}{relative_to}"
        entries.append(Entry(f"{of}{name}", median_ms, spread, ratio, relative, 1 / median, f"{unit}/s"))
    return entries


def quartiles(values: list[float]) -> tuple[float, float]:
    """The lower and the upper quartile, each one of the values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def peak_memory_gb(run: Run, device: torch.device) -> float | None:
    """The most GB of tensors on the GPU during `run`, also of what it does not use; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 1e9


def utilization(model: Decoder, rate: float, device: torch.device, causal: bool = False) -> float | None:
    """Model FLOPs utilization, 0 to 1, of `rate` tokens/s on one device; None where its peak is not known.

    By PaLM's count, (6 weights + 12 L d_model T) per token; causal: half of the scores are computed.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = peak_flops(name, model.compute_dtype or torch.float32)
    return None if peak is None else model.flops_per_token(model.config.context, causal) * rate / peak


def facts() -> dict[str, str]:
    """The machine and the versions that times depend on."""
    found = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    found["commit"] = git_commit() or "unknown"
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cudnn": str(torch.backends.cudnn.version())}
        if driver := nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader", "--id=0").strip():
            found["driver"] = driver
        if (triton := triton_version()) is not None:
            found["triton"] = triton
    return found


def main(
    doc: str | None, bench: Callable[..., Iterable[Result]], head: str = HEAD, overrides: bool = True, **options: str
) -> int:
    """Runs `bench`, prints each result as it is measured, and writes all to the file of `--out`; returns the exit code.

    overrides: whether `bench` is given a list of GROUP=OPTION and KEY=VALUE. options: the defaults of its other
    arguments, which are options of the command line. Under torchrun the first rank prints and writes.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    for name, default in options.items():
        choices = ("cpu", "cuda") if name == "device" else None
        parser.add_argument(f"--{name}", default=default, choices=choices, help=f"default: {default}")
    arguments, given = parser.parse_known_args()
    wrong = [argument for argument in given if argument.startswith("-") or not overrides]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    is_first = os.environ.get("RANK", "0") == "0"
    out = None if arguments.out is None or not is_first else arguments.out.expanduser()
    found: list[dict[str, Any]] = []
    try:
        if out is not None:
            check_file(f"--out={out}", out)
            described = facts()  # at the start: the code may be edited while it is measured
        for result in bench(*([given] if overrides else []), **{name: getattr(arguments, name) for name in options}):
            if is_first and not found:
                print(head)
            found.append(result.json())
            if is_first:
                print(result.line(), flush=True)
            if out is not None:  # after each: a later failure loses nothing
                write_json(out, {**described, "entries": found})
    except Exception as error:
        if (code := getattr(error, "exit_code", None)) is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return int(code)
    return 0


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
