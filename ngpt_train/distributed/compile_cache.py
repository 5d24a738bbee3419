"""Where torch.compile keeps compiled code, so that the next start need not compile it again."""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import tempfile
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ngpt_train.config.schema import Config
from ngpt_train.core.log import say_once

# The part of the directory that each variable names: torch's own compilations, and those of Triton's kernels.
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
INDUCTOR, TRITON = VARIABLES
LEAST_FREE = 10**9  # bytes; torch ends a run where a file of its cache cannot be written


def keep_compiled(config: Config) -> None:
    """Has torch.compile keep its files in `data.cache`/compiled, unless its environment variables name a place. Holds
    for this process and those that it starts.

    A user who names torch's directory alone has chosen for Triton too, whose directory lies inside it by default.
    torch's own default is a directory of /tmp, which does not outlive a container or a reboot. It is used where
    `data.cache` cannot be, and the log says so.
    """
    # torch sets the first variable to its default as soon as torch._dynamo is imported.
    if os.environ.get(INDUCTOR) not in (None, default_cache_dir()):
        return
    ours = [name for name in VARIABLES if name == INDUCTOR or name not in os.environ]
    directory = Path(config.data.cache).expanduser().absolute() / "compiled" / machine()
    if problem := unusable(directory):
        line = f"data.cache: {directory} {problem}; torch.compile keeps what it compiles where torch does by default"
        say_once(logging.WARNING, line)
        return
    os.environ |= {name: str(directory / VARIABLES[name]) for name in ours}
    say_once(logging.INFO, f"torch.compile keeps what it compiles in {directory}")


def machine() -> str:
    """A name for this kind of machine: code compiled for another must not be used. torch's own keys hold its version
    and the GPU, but not the CPU, although it compiles for the instructions of this very one (-march=native)."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        kinds = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
        cpu = "\n".join(line for line in first if line.startswith(kinds))
    except OSError:
        cpu = platform.processor()
    python = f"py{'.'.join(platform.python_version_tuple()[:2])}"
    return f"torch{torch.__version__}-{python}-{platform.machine()}-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}"


def unusable(directory: Path) -> str | None:
    """Makes `directory`; says why torch cannot keep its files there, or None where it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"written")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)  # torch does; not every network file system can
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    if os.statvfs(directory).f_flag & os.ST_NOEXEC:
        return "is mounted noexec, so that nothing compiled there runs"
    if shutil.disk_usage(directory).free < LEAST_FREE:
        return f"has less than {LEAST_FREE / 1e9:g} GB left"
    return None
