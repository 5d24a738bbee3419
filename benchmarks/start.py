"""Times commands from their start, in CPU time of all their processes, beside `import torch`; then where the first
step's imports spend theirs.

    python -m benchmarks.start [--out FILE]
"""

import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import Entry, Part, Run, by, interleaved, main

ROUNDS = 6
PACKAGES = 12  # printed
VERBS = [sys.executable, "-m", "ngpt_train"]
# A run of one step, with a validation before and after it, and a checkpoint.
STEP = ["train", "scale=debug", "data=embedded", "train.steps=1", "train.device=cpu", "logging.wandb.mode=disabled"]
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ngpt_train"]
BASE = "import torch"
COMMANDS = {
    BASE: [sys.executable, "-c", BASE],
    "--help": [*VERBS, "--help"],
    "train --help": [*VERBS, "train", "--help"],
    "a wrong key": [*VERBS, "train", "model.d_modl=64"],
    "plan": [*VERBS, "plan", "scale=debug"],
    "one step": [*VERBS, *STEP],
    "one step, compiled": [*VERBS, *STEP, "train.compile=true"],
    "one step on two ranks": [sys.executable, *RANKS, *STEP],
}


def bench() -> Iterator[Entry | Part]:
    with tempfile.TemporaryDirectory() as directory:
        runs = {name: started(command, Path(directory)) for name, command in COMMANDS.items()}
        yield from interleaved(runs, BASE, ROUNDS, "starts", by(children_s))
        profiled = [sys.executable, "-X", "importtime", *VERBS[1:], *STEP, f"run.root={directory}/imports"]
        yield from packages(subprocess.run(profiled, capture_output=True, text=True, check=True).stderr)


def started(command: list[str], directory: Path) -> Run:
    """A start of the command. Each run of it has a directory of its own."""

    def run() -> float:
        own = [f"run.root={tempfile.mkdtemp(dir=directory)}"] if "train.steps=1" in command else []
        done = subprocess.run([*command, *own], capture_output=True, text=True, check=False)
        if done.returncode != (2 if "model.d_modl=64" in command else 0):
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return 1

    return run


def children_s() -> float:
    """CPU seconds of all processes that were started and have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def packages(importtime: str) -> Iterator[Part]:
    """Sums of `python -X importtime`, over modules: of torch's parts each, of all others by package."""
    own: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for line in importtime.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[0].strip().isdigit():
            parts = fields[2].strip().split(".")
            package = ".".join(parts[: 2 if parts[0] == "torch" else 1])
            own[package] += int(fields[0])
            modules[package] += 1
    total = sum(own.values())
    for name, us in own.most_common(PACKAGES):
        yield Part(name, us / 1e3, us / total, modules[name])


if __name__ == "__main__":
    sys.exit(main(__doc__, bench, overrides=False))
