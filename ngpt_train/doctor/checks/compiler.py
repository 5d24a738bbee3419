"""Does torch.compile work? Tests the C or C++ compiler, then compiles one small function."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.distributed.compilation import VARIABLES
from ngpt_train.distributed.layouts import resolve_compile
from ngpt_train.distributed.world import resolve_device
from ngpt_train.doctor.bounded import Report, first_line
from ngpt_train.doctor.findings import WARNING, WRONG, Answer, Finding, unchecked

BUILD_SECONDS = 20.0  # for building a library of one line
REMEDY = "install g++ and gcc (apt install build-essential), or set CXX and CC"


def look(config: Config, local_rank: int, report: Report) -> None:
    """Compiles a function into a temporary directory, on the first rank of each host."""
    device = resolve_device(config.train.device, local_rank)
    # On a CPU torch writes C++. On a GPU Triton starts its kernels by a small C library.
    wanted = os.environ.get("CC") or "gcc" if device.type == "cuda" else os.environ.get("CXX") or "g++"
    path = shutil.which(wanted)
    report(needed=resolve_compile(config.train.compile, device.type), compiler=wanted, path=path)
    if path is None:
        report(wrong=f"there is no {wanted}, which torch.compile needs")
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(prefix="ngpt-train-doctor-") as directory:
        os.environ |= {name: os.path.join(directory, part) for name, part in VARIABLES.items()}
        if broken := compiler_is_broken(wanted, directory):
            report(wrong=f"{path} builds nothing that runs: {broken}")
            return
        report(builds=True)
        if wrong := compiled_is_wrong(device):
            report(wrong=f"{path}: torch.compile fails: {wrong}")


def compiler_is_broken(compiler: str, directory: str) -> str | None:
    """Builds a library of one function and loads it. Returns the error, or None."""
    library = os.path.join(directory, "answer.so")
    command = [compiler, "-shared", "-fPIC", "-x", "c++" if "++" in compiler else "c", "-", "-o", library]
    source = '#ifdef __cplusplus\nextern "C"\n#endif\nint answer(void) { return 42; }\n'
    try:
        subprocess.run(command, input=source, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS)
        return None if ctypes.CDLL(library).answer() == 42 else "its library gives another result"
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip().splitlines() or [f"it ends with code {error.returncode}"])[0]
    except (OSError, subprocess.SubprocessError) as error:
        return first_line(error)


def compiled_is_wrong(device: torch.device) -> str | None:
    """Compiles a small function and compares its result. Returns the error, or None."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inductor.fx_graph_cache = False  # a cached result needs no compiler

    def formula(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * x.mean(-1, keepdim=True) + 1

    x = torch.linspace(-3, 3, 4096, device=device).view(16, 256)
    try:
        found = torch.compile(formula, dynamic=False)(x)
    except Exception as error:  # torch.compile raises errors of many types
        lines = [line for line in str(error).splitlines() if line.strip()]
        return " ".join(lines[:2])[:300] or type(error).__name__
    return None if torch.allclose(found, formula(x), atol=1e-5) else "a compiled function gives another result"


def judge(answer: Answer) -> Iterator[Finding]:
    """Wrong if the run compiles, else a warning."""
    facts = answer.facts
    use = "" if facts.get("needed") else "; this run does not compile"
    verdict = WRONG if facts.get("needed") else WARNING
    if wrong := facts.get("wrong"):
        remedy = f"{REMEDY}; until then train.compile=false" if facts.get("builds") else REMEDY
        yield Finding("compiler", wrong + use, verdict, remedy)
    elif answer.timed_out and facts.get("builds"):
        found = f"{facts['path']} works; torch.compile could not be checked: {answer.problem}{use}"
        yield Finding("compiler", found, WARNING, "look at the load of this host", checked=False)
    elif answer.problem:
        yield unchecked("compiler", answer.problem + use, REMEDY, verdict)
    else:
        yield Finding("compiler", f"{facts['path']}: a small function compiles and is right{use}")
