"""What README.md and docs/ show runs as it stands there, and what docs/studies publishes is made again."""

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.processes import runs

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "from_a_run_to_a_plot.ipynb"
PUBLISHED = ROOT / "docs" / "studies" / "precision"
SHARED_RUNS = PUBLISHED.parent / "gpt_vs_ngpt"  # precision's records link to some of these


def test_python_of_the_readme(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a name that `load`, `build_state` or `train_step` does not have; a step that gives no loss."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    runs.train(runs.arguments(tmp_path, corpus, "run.name=ngpt-tiny-seed0"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(block, "README.md", "exec"), {})
    loss, _ = capsys.readouterr().out.split(" ", 1)
    assert 4 < float(loss) < 7  # ln 257 = 5.5


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


@pytest.mark.slow
def test_published_report_is_made_again(tmp_path: Path) -> None:
    """Caught: a report whose numbers differ from the published records, or a page or a figure that is not made."""
    for study in (SHARED_RUNS, PUBLISHED):
        with tarfile.open(study / "records.tar.xz") as records:
            records.extractall(tmp_path, filter="data")
    out = tmp_path / "report"
    shutil.copytree(PUBLISHED, out)  # with the step times, which no record holds
    runs.run("compare", [f"{tmp_path}/studies/precision", f"compare.out={out}"], code=0)
    assert (out / "report.html").is_file()
    assert len(list((out / "figures").glob("*.svg"))) == 9

    published, again = (json.loads((where / "report.json").read_text()) for where in (PUBLISHED, out))
    for part in ("budgets", "differences", "speedups", "trends"):
        assert numbers(again[part]) == pytest.approx(numbers(published[part]), rel=1e-9), part
    assert len(again["losses"]) == len(published["losses"])
    assert [one["loss"] for one in again["losses"]] == [one["loss"] for one in published["losses"]]


def numbers(part: Any) -> list[float]:
    """All numbers of a part of report.json, in order."""
    if isinstance(part, dict):
        return [number for value in part.values() for number in numbers(value)]
    if isinstance(part, list):
        return [number for value in part for number in numbers(value)]
    return [float(part)] if isinstance(part, int | float) else []
