"""Everything that only a GPU can tell, in one command of bounded length; torch and triton alone are needed.

    python -m ngpt_train bench gpu --budget 520 --out DIR          # one GPU since Ampere, in under 9 minutes
    python -m ngpt_train.bench.gpu --device cpu --scale debug --budget 60

In this order: versions; ceilings (copies and matrix products); whether the kernels are right; steps of GPT and nGPT in
turn at 0.5B and 1B, and nGPT's beside public code's way; attention; how fast the kernels are; steps at other contexts;
nGPT's steps without one kernel after the other. What the budget has no time for is skipped, and said to be; what is
still going on shortly before its end is cut off. DIR receives bench.json, written after each part, and caches.tar.gz,
what torch.compile and Triton compiled: where it lies in DIR already, that is not compiled again.

Exit codes: 0; 1 where a part failed or a run was found wrong; 4 where a kernel is wrong; 5 where a part was cut off.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ngpt_train.bench import attention, kernels
from ngpt_train.bench.device_facts import facts
from ngpt_train.bench.gpu import steps
from ngpt_train.bench.gpu.budget import ending_in_time
from ngpt_train.bench.gpu.caches import compile_caches
from ngpt_train.bench.gpu.ceilings import ceilings
from ngpt_train.bench.gpu.comparisons import ABLATIONS, ablation_pair, run_ablation, run_public_style
from ngpt_train.bench.gpu.predictions import PUBLIC_STYLE
from ngpt_train.bench.gpu.steps import Measured, OutOfTimeError, Place, Row
from ngpt_train.bench.gpu.tables import kernel_line, print_tables, step_line
from ngpt_train.core.files import write_json

ATTENTION_SHARE, KERNELS_SHARE = 0.1, 0.15  # of the budget, at the most
MFU = (
    "FLOPs per token * tokens/s / peak of dense bf16 products; FLOPs per token: 6 weights + 12 L d T (mfu), "
    "6 weights + 6 L d T (mfu_causal); null where the peak is not known"
)
SCALES: dict[str, tuple[list[kernels.Shape], kernels.Sizes]] = {
    "paper": (kernels.SHAPES, kernels.ON_GPU),
    "debug": ([(64, 256, 32)], kernels.Sizes(2, 64, 512, 3)),
}
ATTENTION = {"paper": attention.ON_GPU, "debug": [(2, 2, 64, 32)]}
# The most important first, because time may run out.
HEADLINES = {"paper": [Row("0.5b", 4096), Row("1b", 4096)], "debug": [Row("debug", 64)]}
OTHER_ROWS = {
    "paper": [Row("0.5b", 1024), Row("0.5b", 8192), Row("1b", 1024), Row("1b", 8192)],
    "debug": [Row("debug", 128)],
}
PREPARATION = {"paper": 45.0, "debug": 1.0}  # seconds; see Place
# Each ablation compiles the blocks again. At torch's default limit of recompilations a block would go on in eager mode,
# at another speed and without a word.
COMPILING: dict[str, Any] = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}


class Protocol:
    """Runs the benchmarks, part by part, and collects their results, which are written to bench.json after each part.

    scale: a key of SCALES. budget: seconds from now. out: the directory of bench.json.
    """

    def __init__(self, scale: str, device: torch.device, budget: float, out: Path) -> None:
        self.scale, self.device, self.out = scale, device, out
        self.started = time.monotonic()
        self.budget = budget
        self.deadline = self.started + budget - reserved(budget)
        on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})"
        self.place = Place(device.type, name, self.deadline, PREPARATION[scale])
        self.cases: list[kernels.Case] = []
        self.errors: dict[str, float] = {}  # of the operations that are right, by their case's name
        self.steps: list[Measured] = []
        # The thread that cuts a part off writes bench.json, and the part may be writing it.
        self.writing = threading.Lock()
        self.doing = "versions"  # the name of the part at work
        self.found: dict[str, Any] = {"what": "gpu", "scale": scale, "is_gpu": on_gpu, "device": name, "mfu": MFU}
        self.found |= {"ceilings": {}, "entries": [], "skipped": [], "cut_off": [], "problems": [], "log": []}

    def parts(self) -> list[Callable[[], None]]:
        """The parts, in their order. The log calls each by its function's name."""
        return [
            *(self.versions, self.ceilings, self.checks, self.headlines, self.public_style, self.attention),
            *(self.kernel_times, self.other_rows, self.ablations),
        ]

    def say(self, text: str) -> None:
        """Prints a line with the seconds since the start, and logs it in bench.json."""
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)
        self.found["log"].append(text)

    def skip(self, what: str) -> None:
        """Notes that the budget has no time for a part."""
        self.say(f"{what}: skipped (budget)")
        self.found["skipped"].append(what)

    def cut_off(self) -> None:
        """Notes that the part at work is cut off."""
        self.say(f"{self.doing}: cut off (budget)")
        self.found["cut_off"].append(self.doing)

    def problem(self, text: str) -> None:
        """Notes that something failed or is wrong, which makes the exit code 1."""
        self.say(f"FAILED: {text}")
        self.found["problems"].append(text)

    def late(self, until: float | None = None) -> bool:
        """Whether the deadline is over, or `until`, a value of time.monotonic()."""
        return time.monotonic() > min(self.deadline, until or self.deadline)

    def end_of_share(self, share: float) -> float:
        """When, of time.monotonic(), a part that begins now has used up this share of the budget."""
        return time.monotonic() + share * self.budget

    def write(self, patience: float = -1) -> None:
        """Writes bench.json. patience: seconds to wait for another thread that writes it and may hang; -1: forever."""
        if not self.writing.acquire(timeout=patience):
            self.say("bench.json: not written, because writing it hangs")
            return
        try:
            write_json(self.out / "bench.json", dict(self.found))
        finally:
            self.writing.release()

    def print_tables(self) -> None:
        print_tables(self.found, self.steps)

    def versions(self) -> None:
        device_facts = facts(self.device)
        self.found |= device_facts
        for name, value in {"device": self.place.name, **device_facts}.items():
            self.say(f"{name}: {value}")
        if self.device.type != "cuda":
            self.say("THIS IS NOT A GPU: nothing below says anything about one")

    def ceilings(self) -> None:
        if self.device.type == "cuda":
            self.found["ceilings"] = ceilings(self.device, self.say)

    def checks(self) -> None:
        """Checks all operations. Raises KernelError at the end where one is wrong: its times would mean nothing."""
        shapes, sizes = SCALES[self.scale]
        self.cases = [case for shape in shapes for case in kernels.cases_of(self.device, shape, sizes)]
        wrong = []
        for case in self.cases:
            with self.going_on(f"check of {case.name}"):
                self.in_time()
                try:
                    self.errors[case.name] = kernels.check(case, self.say)
                except kernels.KernelError as error:
                    self.problem(str(error))
                    wrong.append(case.name)
        if wrong:
            raise kernels.KernelError(f"nothing is timed, because of {'; '.join(wrong)}")

    def kernel_times(self) -> None:
        until = self.end_of_share(KERNELS_SHARE)
        ceiling = self.found["ceilings"].get("copy_gb_per_s")
        rounds = SCALES[self.scale][1].rounds
        for case in self.cases:
            with self.going_on(f"times of {case.name}"):
                self.in_time(until)
                if (error := self.errors.get(case.name)) is None:
                    continue
                for entry in kernels.times(case, error, ceiling, self.device, rounds):
                    self.say(kernel_line(entry))
                    self.found["entries"].append(entry.json())

    def attention(self) -> None:
        until, compiled_until = self.end_of_share(ATTENTION_SHARE), self.end_of_share(ATTENTION_SHARE / 2)
        for shape in ATTENTION[self.scale]:
            with self.going_on(f"attention, {shape[2]} tokens"):
                self.in_time(until)
                steps.free_memory()
                for entry in attention.bench(self.device, [shape], 5, self.say, compiled_until):
                    assert entry.rate is not None
                    self.say(f"{entry.name}: {1e3 * entry.median_ms:.0f} us, {entry.rate / 1e12:.3g} TFLOP/s")
                    self.found["entries"].append(entry.json())

    def headlines(self) -> None:
        self.pairs(HEADLINES[self.scale])

    def other_rows(self) -> None:
        self.pairs(OTHER_ROWS[self.scale])

    def pairs(self, rows: Sequence[Row]) -> None:
        """Steps of GPT and nGPT in turn on each row."""
        for row in rows:
            with self.going_on(f"steps of {row.name}"):
                self.note(steps.run_pair(row, self.place, self.say))

    def public_style(self) -> None:
        row = HEADLINES[self.scale][0]
        with self.going_on(f"steps of {row.name}, {PUBLIC_STYLE}"):
            self.note(run_public_style(row, self.place, self.say))

    def ablations(self) -> None:
        row = HEADLINES[self.scale][0]
        pair = None
        with self.going_on(f"steps of {row.name}, ablations"):
            pair = ablation_pair(row, self.place, self.say)
        for ablation in ABLATIONS if pair else ():
            with self.going_on(f"steps of {row.name}, {ablation[0]}"):
                self.note([run_ablation(ablation, pair, row, self.place)])

    def note(self, measured: Sequence[Measured]) -> None:
        """Adds results of steps, and their problems, to what was found."""
        for one in measured:
            self.steps.append(one)
            self.found["entries"].append(one.json())
            self.say(step_line(one))
            for problem in one.problems:
                self.problem(f"{one.row}, {one.variant}: {problem}")

    def in_time(self, until: float | None = None) -> None:
        """Raises OutOfTimeError where it is `late`."""
        if self.late(until):
            raise OutOfTimeError

    @contextlib.contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Around a part, or a piece of one: notes its error or that it is out of time, then writes bench.json.

        So an error ends this part alone. Only KernelError passes through.
        """
        self.doing = what
        try:
            yield
        except kernels.KernelError:
            raise
        except OutOfTimeError:
            self.skip(what)
        except Exception as error:
            traceback.print_exc()
            self.problem(f"{what}: {type(error).__name__}: {error}")
        self.write()


def reserved(budget: float) -> float:
    """Seconds at the end of the budget in which nothing is measured, for the tables and for storing the caches."""
    return min(15.0, budget / 4)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `bench gpu` with these arguments; returns the exit code, which the module's docstring explains."""
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
    archive = arguments.out / "caches.tar.gz"
    known = {key: value for key, value in COMPILING.items() if hasattr(torch._dynamo.config, key)}
    with compile_caches(archive) as directory, torch._dynamo.config.patch(known):
        with ending_in_time(protocol, directory, archive):
            code = run(protocol)
        protocol.print_tables()
    protocol.say(f"{arguments.out / 'bench.json'}: {'FAILED' if code else 'all checks passed'}")
    return code


def run(protocol: Protocol) -> int:
    """Runs all parts; returns the exit code."""
    for part in protocol.parts():
        try:
            with protocol.going_on(part.__name__):
                part()
        except kernels.KernelError as error:
            protocol.problem(str(error))
            protocol.write()
            return error.exit_code
    return int(bool(protocol.found["problems"]))
