"""The notebook of docs/ runs as it stands there."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.processes import runs

NOTEBOOK = Path(__file__).parents[2] / "docs" / "from_a_run_to_a_plot.ipynb"


def test_notebook_runs(tmp_path: Path, corpus: Path) -> None:
    """Caught: a cell that names what `load` or metrics.jsonl does not have."""
    runs.train(runs.arguments(tmp_path, corpus, f"run.root={tmp_path}", "run.name=first", "eval.every=6"))
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    script = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = script.replace('"runs/first"', f'"{tmp_path / "first"}"')
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(NOTEBOOK.parents[1])}
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "curves_of_my_own.png").stat().st_size > 5000
    assert len([line for line in finished.stdout.splitlines() if line.endswith("'")]) > 10  # losses of tokens
