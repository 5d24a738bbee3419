"""The findings of checks: made in processes of their own, because a kernel may crash one or hang, and kept on disk.

A process is `__main__.py` beside this file. The key of what is kept has everything that may change it.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

import ngpt_train
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, text_of, write_json
from ngpt_train.kernels.check.calls import Call
from ngpt_train.kernels.dispatch import interpreted

logger = logging.getLogger(__name__)

START_SECONDS = 180.0  # to import torch, perhaps from a slow disk, and to reach the GPU
WORK_SECONDS = {"check": 120.0, "times": 180.0}  # of one call; most of it is for the compiler
SMI_SECONDS = 10.0
UNUSABLE = 3  # exit code of a process whose GPU no longer works for it
HUNG = -signal.SIGALRM  # exit code of a process that was not done in time: its own timer ends it


@dataclass(frozen=True)
class Request:
    """The task of a process. compiled: blocks are compiled. times: kernels are timed, too."""

    device: str
    dtype: str
    attention: str
    d_head: int
    compiled: bool
    times: bool


@dataclass
class Finding:
    """The result of checking one call of a kernel on this machine."""

    error: float | None = None  # the largest relative error of an output or a gradient
    problem: str | None = "it was not checked"  # why the kernel must not run; None: it is right
    lasting: bool = False  # True if another check would find the same
    seconds: float | None = None  # of the check, with compilation
    us: float | None = None  # microseconds of the kernel, forward and backward
    plain_us: float | None = None  # of plain PyTorch in its place
    untimed: str | None = None  # why there are no times


def findings(calls: Sequence[Call], request: Request) -> list[Finding]:
    """The finding of each call. A process that ends or hangs at one is followed by another for the rest."""
    found = [Finding() for _ in calls]
    todo = list(range(len(calls)))
    while todo:
        done = _one_process([calls[n] for n in todo], request, [found[n] for n in todo])
        todo = todo[done:]
    return found


def _one_process(calls: Sequence[Call], request: Request, found: Sequence[Finding]) -> int:
    """Fills in `found`; returns how many calls are settled, at least one."""
    package = Path(ngpt_train.__file__).resolve().parent
    paths = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": f"{package.parent}{os.pathsep + paths if paths else ''}"}
    seconds = {"start": START_SECONDS} | WORK_SECONDS
    asked = json.dumps(vars(request) | {"seconds": seconds, "calls": [call.json() for call in calls]})
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            # -P: run this code, even if the current directory has a package of the same name.
            [sys.executable, "-P", "-m", "ngpt_train.kernels.check", asked],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,  # so that the compilers that it starts end with it
        )
        try:
            code = process.wait(START_SECONDS + len(calls) * sum(WORK_SECONDS.values()))
        except subprocess.TimeoutExpired:
            code = HUNG
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        at, doing = 0, "start"
        for line in output:
            told = json.loads(line)
            at, doing = told.pop("at"), told.pop("doing", "next")
            for name, value in told.items():
                setattr(found[at], name, value)
        why = how(code)
        if doing == "times":  # the kernel is right, and stays without times
            ended = "timing it did not end" if code == HUNG else f"timing it ended its process ({why})"
            found[at].untimed = ended
        elif doing == "check":
            limit = f"it did not end within {WORK_SECONDS[doing]:g} seconds"
            found[at].problem = (limit if code == HUNG else f"it ended its process: {why}") + last(errors)
            found[at].lasting = code != HUNG  # a machine that was busy may not be so next time
        elif doing == "start":
            for one in found:
                problem = "too slow" if code == HUNG else why
                one.problem = f"the process that checks did not start: {problem}{last(errors)}"
            return len(calls)
    return at + 1 if code else len(calls)


def how(code: int) -> str:
    """Names the exit code or signal of a process."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


def last(errors: IO[str]) -> str:
    """The last line of the errors, for a message; empty without a line."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read()[-4000:].splitlines() if line.strip()]
    return f", {lines[-1][:200]}" if lines else ""


def as_json(found: Finding) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if value is not None}


def machine(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions and code: findings hold for these alone."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else None,
        "driver": driver() if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "interpreted": interpreted(),
        "commit": git_commit(),
        "sources": sources(),
    }


def sources() -> str:
    """A hash of all files of ngpt_train/kernels, because a commit does not know of edits."""
    room = Path(ngpt_train.__file__).parent / "kernels"
    content = hashlib.sha256()
    for path in sorted(room.rglob("*.py")):
        content.update(f"{path.relative_to(room)}\n".encode() + path.read_bytes())
    return content.hexdigest()[:16]


def triton_version() -> str | None:
    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def driver() -> str | None:
    """The driver's version; None if it is unknown."""
    of_kernel = text_of(Path("/proc/driver/nvidia/version")).partition("\n")[0]
    return of_kernel or nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader", "--id=0").strip() or None


def nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi; empty if it is missing or fails."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


class Kept:
    """The findings in `directory` for this machine and request; a file for each call."""

    def __init__(self, directory: Path, device: torch.device, request: Request) -> None:
        self.key = {"machine": machine(device), "compiled": request.compiled, "attention": request.attention}
        self.times = request.times
        self.directory = directory / _hash(self.key)

    def get(self, call: Call) -> Finding | None:
        """The finding of an earlier check. None without a check, and if times are asked for and it has none."""
        path = self._path(call)
        if not path.exists():
            return None
        try:
            stored = read_json(path)
            found = Finding(**{"problem": None} | stored["finding"])
        except (DataError, TypeError, KeyError) as error:
            logger.warning("%s is left out: %s", path, error)
            return None
        timed = found.us is not None or found.untimed is not None or found.problem is not None
        return found if timed or not self.times or not stored["timeable"] else None

    def put(self, call: Call, found: Finding, timeable: bool) -> None:
        """Keeps a lasting finding. A full or read-only disk is a warning."""
        if not found.lasting:
            return
        content = {**self.key, "call": call.json(), "timeable": timeable, "finding": as_json(found)}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self._path(call), content)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.directory, error.strerror)

    def _path(self, call: Call) -> Path:
        return self.directory / f"{call.kernel.replace(' ', '_')}-{_hash(call.json())}.json"


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
