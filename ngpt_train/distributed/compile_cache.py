"""The directory of torch.compile's compiled code, so that the next start need not compile it again."""

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

# The environment variables of torch's compiled code and of Triton's kernels, each with its subdirectory of ours.
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
INDUCTOR, TRITON = VARIABLES
LEAST_FREE = 10**9  # bytes free on the disk; torch ends a run if it cannot write a file of its cache


def keep_compiled(config: Config) -> None:
    """Makes torch.compile keep its files in `data.cache`/compiled, in this process and its child processes.

    Directories set by the user in the environment stay. If only TORCHINDUCTOR_CACHE_DIR is set, Triton's directory is
    inside it, which is torch's default. If `data.cache` is unusable, the log says so and torch's own directory is used.
    It is in /tmp and does not survive a container or a reboot.
    """
    # torch sets the first variable to its default as soon as torch._dynamo is imported.
    if os.environ.get(INDUCTOR) not in (None, default_cache_dir()):
        return
    ours = [name for name in VARIABLES if name == INDUCTOR or name not in os.environ]
    directory = Path(config.data.cache).expanduser().absolute() / "compiled" / machine()
    if problem := why_unusable(directory):
        line = f"data.cache: {directory} {problem}; torch.compile keeps compiled code in its own directory"
        say_once(logging.WARNING, line)
        return
    os.environ |= {name: str(directory / VARIABLES[name]) for name in ours}
    say_once(logging.INFO, f"torch.compile keeps compiled code in {directory}")


def machine() -> str:
    """A name for this kind of machine. Compiled code of another kind must not be used.

    torch's own cache keys have its version and the GPU. They do not have the CPU, although torch compiles for the
    instructions of this CPU (-march=native).
    """
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        kinds = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
        cpu = "\n".join(line for line in first if line.startswith(kinds))
    except OSError:
        cpu = platform.processor()
    python = f"py{'.'.join(platform.python_version_tuple()[:2])}"
    return f"torch{torch.__version__}-{python}-{platform.machine()}-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}"


def why_unusable(directory: Path) -> str | None:
    """Creates `directory`. Returns the reason why torch cannot keep its files there, or None if it can."""
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
