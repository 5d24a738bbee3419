"""What docs/studies publishes is made again from its records by the command that stands there."""

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.processes import runs

PUBLISHED = Path(__file__).parents[2] / "docs" / "studies" / "precision"
SHARED_RUNS = PUBLISHED.parent / "gpt_vs_ngpt"  # precision's records link to some of these


@pytest.mark.slow
def test_published_report_is_made_again(tmp_path: Path) -> None:
    """Caught: a report whose numbers differ from the published records, or a page or a figure that is not made."""
    for study in (SHARED_RUNS, PUBLISHED):
        with tarfile.open(study / "records.tar.xz") as records:
            records.extractall(tmp_path, filter="data")
    out = tmp_path / "report"
    shutil.copytree(PUBLISHED, out)  # with the step times, which no record holds
    finished = runs.run("compare", [f"{tmp_path}/studies/precision", f"compare.out={out}"])
    assert finished.returncode == 0, finished.stderr[-4000:]
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
