"""The Python of README.md runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.processes import runs

ROOT = Path(__file__).parents[2]


def test_python_of_the_readme(tmp_path: Path, corpus: Path) -> None:
    """Caught: a name that `load`, `build_state` or `train_step` does not have; a step that gives no loss."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    runs.train(runs.arguments(tmp_path, corpus, "run.name=ngpt-tiny-seed0"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    loss, _ = finished.stdout.split(" ", 1)
    assert 4 < float(loss) < 7  # ln 257 = 5.5
