"""Modules that need a Triton without its interpreter, which the tests' own process has chosen."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def printed_by(module: str, *arguments: str) -> str:
    """The output of `python -m tests.unit.kernels.MODULE`; raises with its errors if it fails."""
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.unit.kernels.{module}", *arguments],
        check=False,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
