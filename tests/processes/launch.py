"""Starts a worker of the tests under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(worker: str, out: Path, ranks: int, *arguments: str) -> list[Path]:
    """Runs `worker OUT ARGUMENTS...` of this folder; the files OUT.rank that the ranks write."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    finished = subprocess.run(
        [*command, str(Path(__file__).with_name(worker)), str(out), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [Path(f"{out}.{rank}") for rank in range(ranks)]
