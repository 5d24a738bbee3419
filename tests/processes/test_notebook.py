"""The notebook of docs/ runs as it stands there."""

import json
from pathlib import Path

import pytest

from tests.processes import runs

NOTEBOOK = Path(__file__).parents[2] / "docs" / "from_a_run_to_a_plot.ipynb"


def test_notebook_runs(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a cell that names what `load` or metrics.jsonl does not have."""
    given = runs.arguments(tmp_path, corpus, f"run.root={tmp_path}", "run.name=first", "eval.every=6")
    runs.train(given)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    script = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = script.replace('"runs/first"', f'"{tmp_path / "first"}"')
    monkeypatch.chdir(tmp_path)
    exec(compile(script, str(NOTEBOOK), "exec"), {})
    assert (tmp_path / "curves_of_my_own.png").stat().st_size > 5000
    assert len([line for line in capsys.readouterr().out.splitlines() if line.endswith("'")]) > 10  # losses of tokens
