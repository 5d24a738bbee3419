"""torch.compile: the directory that keeps compiled code for the next start, and compiled blocks as CUDA graphs.

torch records each block's forward and backward pass as a CUDA graph (torch/_inductor/cudagraph_trees.py). All graphs
share one pool of memory, and a replay writes its outputs to the recorded addresses. torch tracks outputs in use only
within one "step", and the caller tells torch where a step begins: recording a block frees all outputs of earlier steps,
a replay overwrites them silently. So no output may be needed after the next step begins. Here a step is one forward
pass of the model and its backward pass, if there is one (`begin_graph_step_at_forward`). The outputs of a block are

- hidden states, and tensors saved for the backward pass or recomputed in it: not needed after the backward pass;
- gradients of parameters, which are needed. If `.grad` were None, autograd would put the graph's memory there, and a
  second micro batch would overwrite the gradient. So from the first step on `.grad` is a tensor of ours, zeroed and
  never dropped, to which autograd adds a graph's gradient at once (`hold_gradients`).

Losses, their sums and the gradients of embeddings are outside of graphs. Graphs read the weights in place; all other
inputs are copied into the graph's memory. Evaluation must also tell torch where its forward passes begin: without a
backward pass torch takes each call of a block for a step, and would free the hidden state that the next block reads.

The config refuses DDP and FSDP2, whose gradients and weights have their own memory, and PowerNorm, whose statistics
leave the graphs through hooks: nobody has worked these out.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.core.files import text_of
from ngpt_train.core.log import say_once

# The environment variables of torch's compiled code and of Triton's kernels, each with its subdirectory of ours.
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
INDUCTOR, TRITON = VARIABLES
LEAST_FREE = 10**9  # bytes free on the disk; torch ends a run if it cannot write a file of its cache


def keep_compiled(config: Config) -> None:
    """Makes torch.compile keep its files in `data.cache`/compiled, in this process and its child processes. Directories
    that the environment names stay; if that is TORCHINDUCTOR_CACHE_DIR alone, Triton's is inside it. If `data.cache` is
    unusable, the log says so, and torch's own directory is used, which does not survive a reboot."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

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
    """A name for this kind of machine, whose compiled code no other may use. torch's own cache keys have its version
    and the GPU, but not the CPU, for whose instructions it compiles (-march=native)."""
    first = text_of(Path("/proc/cpuinfo")).partition("\n\n")[0].splitlines()
    kinds = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    cpu = "\n".join(line for line in first if line.startswith(kinds)) or platform.processor()
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


def check_cuda_graphs(device: torch.device) -> None:
    """Raises ConfigError if the device is not a GPU, as train.device=auto may find."""
    if device.type != "cuda":
        problem = f"train.cuda_graphs=true: the device is {device.type}, and only GPUs have CUDA graphs"
        raise ConfigError(f"{problem}\n  Set train.cuda_graphs=false")


def begin_graph_step_at_forward(model: nn.Module) -> None:
    """Makes each forward pass of `model` begin a step of torch's CUDA graphs."""
    model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    say_once(logging.INFO, "compiled blocks are recorded as CUDA graphs and replayed (train.cuda_graphs)")


def hold_gradients(model: nn.Module) -> None:
    """Gives every parameter without a gradient a zero gradient, to which backward passes add in place. For use in a
    step and not earlier: loading a checkpoint takes gradients away again."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
