"""Telemetry of runs: on two ranks, in the files of a run, across a restart."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes.launch import launch
from tests.processes.runs import arguments, numbers, records, run, train
from tests.processes.telemetry_worker import STEPS

NAMES = ["ngpt", "normformer", "powernorm"]


def reports(out: Path, parallel: str, ranks: int) -> list[dict[str, Any]]:
    found = launch("telemetry_worker.py", out, ranks, parallel, *NAMES)
    return [json.loads(path.read_text()) for path in found]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (report,) = reports(tmp_path_factory.mktemp("single") / "out", "single", 1)
    return report


@pytest.mark.parametrize(
    ("parallel", "n_ranks"), [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)]
)
def test_on_several_ranks(single: dict[str, Any], parallel: str, n_ranks: int, tmp_path: Path) -> None:
    """By brute force on whole weights, and beside one process. Caught: rows of another rank's part of a fused matrix,
    whole vectors that all ranks add, shards that each group adds, a mean of means, the rows of rank 0 alone."""
    ranks = reports(tmp_path / "out", parallel, n_ranks)
    for name in NAMES:
        here, *others = (rank[name] for rank in ranks)
        assert all(here["records"] == other["records"] for other in others)
        record = here["records"][-1]
        assert [each["step"] for each in here["records"]] == [1, STEPS]
        for key, value in here["changes"].items():
            assert record[key] == pytest.approx(value, rel=4 * 2**-23, nan_ok=True), key
        for place in here["scores"]:
            largest, saturated, rows = zip(*(rank[name]["scores"][place] for rank in ranks), strict=True)
            assert len(set(largest)) == n_ranks
            assert record[f"attention_max_logit/{place}"] == pytest.approx(max(largest), rel=1e-4)
            share = sum(saturated) / sum(rows)
            assert record[f"attention_saturated/{place}"] == pytest.approx(share, abs=2 / rows[0])
        for place in here["nu"]:
            nu = [rank[name]["nu"][place] for rank in ranks]
            assert len(set(nu)) == n_ranks
            assert record[f"nu_l2/{place.removesuffix('.nu')}"] == pytest.approx(sum(nu) / n_ranks, rel=1e-6)
        if name != "powernorm":  # whose statistics, and so its gradients, are those of a rank's own rows
            first, expected = here["records"][0], single[name]["records"][0]
            assert first.keys() == expected.keys()
            for key in [key for key in expected if key.startswith(("grad", "weight", "value", "update", "angle"))]:
                # Adam divides a gradient by its size, so that an entry near 0 may move the other way.
                assert first[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-9, nan_ok=True), key


def test_in_the_files_of_a_run(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scheme of names; nothing in the console, the curves or other records. Caught: records before a checkpoint
    that are lost or come twice, telemetry that changes the run."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = ["logging.telemetry=2", "logging.every=5", "checkpoint.every=4", "logging.tensorboard=true"]
    whole, parts, plain = (tmp_path / name for name in ("whole", "parts", "plain"))
    with monkeypatch.context() as drawn:
        drawn.setenv("NGPT_TESTS_CURVES", "1")
        finished = run("train", arguments(whole, corpus, *options))
    assert finished.returncode == 0, finished.stderr
    train(arguments(parts, corpus, *options, "train.stop_at=7"))
    # As after a kill at step 7: the checkpoint of step 4 is the last one.
    newest = parts / "runs/test/checkpoints/step_00000007"
    newest.rename(parts / "gone")
    train(arguments(parts, corpus, *options))
    train(arguments(plain, corpus, "logging.every=5", "checkpoint.every=4"))

    found, resumed = (records(directory / "runs/test", "telemetry") for directory in (whole, parts))
    assert list(found) == [2, 4, 6, 8, 10, 12]
    trained = [record.pop("train_seconds") for record in found.values()]
    assert trained == sorted(trained)
    assert all(record.pop("train_seconds") for record in resumed.values())
    assert resumed == found
    assert found[12]["flops"] == records(whole / "runs/test", "eval")[12]["flops"]
    assert numbers(whole / "runs/test") == numbers(plain / "runs/test")
    assert "update_ratio/layers.0.wq" in found[2]
    assert "update_ratio" not in finished.stdout
    assert "telemetry" not in (whole / "runs/test/logs/rank_0.log").read_text()
    assert (whole / "runs/test/curves.png").exists()
    events = accumulator.EventAccumulator(str(whole / "runs/test/tensorboard")).Reload()
    scalars = events.Scalars("telemetry/update_ratio/layers.0.wq")
    assert [event.step for event in scalars] == list(found)
    assert scalars[0].value == pytest.approx(found[2]["update_ratio/layers.0.wq"])
