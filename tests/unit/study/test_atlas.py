"""docs/atlas.md follows from docs/atlas.yaml and the published studies."""

import json
from pathlib import Path

import pytest

from scripts import atlas


def test_the_atlas_is_what_the_command_writes() -> None:
    assert (atlas.DOCS / "atlas.md").read_text() == atlas.text(atlas.DOCS / "studies")


def test_cells_of_an_arm() -> None:
    """Caught: another budget's difference, a ratio within a schedule, a step time of a run's own clock."""
    found = {"arm": "muon", "estimate": -0.5, "low": -0.6, "high": -0.4}
    ratio = {"arm": "muon", "how": "annealed", "unit": "tokens", "low": None, "high": None, "extrapolated": False}
    report = {
        "baseline": "adam",
        "verdicts": {"muon": "worse"},
        "differences": [found | {"budget": 10}, found | {"budget": 4000, "estimate": 0.25, "low": 0.1, "high": 0.4}],
        "speedups": [
            ratio | {"budget": 4000, "how": "within_schedule", "estimate": 9.0},
            ratio | {"budget": 10, "estimate": 8.0},
            ratio | {"budget": 4000, "estimate": None},
        ],
        "costs": [
            {"arm": "adam", "step_time": 2.0, "step_time_how": "measured in turn"},
            {"arm": "muon", "step_time": 2.2, "step_time_how": "measured in turn"},
        ],
    }
    assert atlas.measured(report, "muon") == "`muon`, `adam` | 4,000 | 0.250 (0.100 to 0.400) | - | worse | 1.10"
    report["costs"][0]["step_time_how"] = "own"
    assert atlas.measured(report, "muon").endswith("| worse | -")


def test_an_arm_that_the_report_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="absent"):
        atlas.measured(json.loads((atlas.DOCS / "studies/precision/report.json").read_text()), "absent")
