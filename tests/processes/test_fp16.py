"""fp16 on two ranks: one loss scale, one decision, and the run of one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes.fp16_worker import BAD, STEPS
from tests.processes.launch import launch


def run(out: Path, ranks: int, parallel: str) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text()) for path in launch("fp16_worker.py", out, ranks, parallel)]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    (report,) = run(tmp_path_factory.mktemp("single") / "out", 1, "single")
    return report


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_agree_on_an_overflow(single: list[dict[str, Any]], parallel: str, tmp_path: Path) -> None:
    """Losses as on one process to fp16's rounding. Caught: a rank that skips a step alone, or scales its loss with a
    scale of its own; gradients that are scaled once for each rank."""
    first, second = run(tmp_path / "out", 2, parallel)
    assert first == [pytest.approx(there, nan_ok=True) for there in second]
    assert [step["skipped"] for step in first] == [step == BAD for step in range(STEPS)]
    assert [step["loss_scale"] for step in first] == [2.0**16 if step <= BAD else 2.0**15 for step in range(STEPS)]
    assert first[BAD]["weights"] == first[BAD - 1]["weights"] != first[BAD + 1]["weights"]
    for here, one in zip(first, single, strict=True):
        assert here["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert here["skipped"] or here["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)
    assert first[-1]["loss"] < 0.98 * first[0]["loss"]
