"""What ranks tell each other in a step, call by call: nothing to project, and no gradient twice."""

import json
from typing import Any

import pytest

from tests.processes.launch import launch

LAYOUTS = {"ddp": 2, "fsdp": 2, "hsdp": 4}  # ranks


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What every rank reports, which must be the same."""
    out = tmp_path_factory.mktemp(request.param) / "report"
    reports = [
        json.loads(report.read_text())
        for report in launch("communication_worker.py", out, LAYOUTS[request.param], request.param)
    ]
    assert all(report["steps"] == reports[0]["steps"] for report in reports)
    worst = {
        case: max((report["update"][case] for report in reports), key=lambda x: (x["collectives"], x["off_sphere"]))
        for case in reports[0]["update"]
    }
    return request.param, {"update": worst, "steps": reports[0]["steps"]}


def test_the_projection_costs_no_collective(layout: tuple[str, dict[str, Any]]) -> None:
    """Caught: a projection of whole matrices, lengths of rows that ranks add up, by the optimizer's kernel too."""
    update = layout[1]["update"]
    assert sorted(update) == ["ngpt, torch", "ngpt, triton", "ntransformer, torch"]
    for found in update.values():
        assert found["collectives"] == 0
        assert found["off_sphere"] < 1e-6, "nothing was projected"


def test_what_a_step_costs(layout: tuple[str, dict[str, Any]]) -> None:
    """Caught: DDP that adds gradients up in each micro batch, FSDP2 that gathers or scatters more often than asked for,
    groups of HSDP that add up in each micro batch; options that change the run."""
    kind, steps = layout[0], layout[1]["steps"]
    ranks, shard = LAYOUTS[kind], 2
    for case, found in steps.items():
        exchange, n = case.rsplit(", ", 1)
        assert found["losses"] == pytest.approx(steps["as it is, 1"]["losses"], rel=1e-6)
        if kind == "ddp":
            # The number of targets, the loss, and the gradients, once.
            assert found["calls"] == {f"all-reduce of {ranks}": [3, 16 + found["of parameters"]]}
        else:
            passes = int(n)
            groups = found["blocks"] + 1  # with the embeddings, which are not gathered again to go back
            gathers = {
                "as it is": passes * (2 * groups - 1),
                "scatter step": passes * (2 * groups - 1),
                "gather micro_batch": passes * groups,
                "gather step, scatter step": groups,
            }[exchange]
            scatters = groups if "scatter step" in exchange else passes * groups
            calls = dict(found["calls"])
            assert calls.pop(f"all-gather of {shard}")[0] == gathers
            scattered = [scatters, scatters // groups * found["of matrices"]]
            assert calls.pop(f"reduce-scatter of {shard}") == scattered
            # Numbers of targets, the loss, the norm, and the gradients of the vectors.
            over_all = [4, 24 + found["of vectors"]]
            if kind == "fsdp":
                assert calls == {f"all-reduce of {ranks}": over_all}
            else:
                assert calls == {
                    f"all-reduce of {ranks}": over_all,
                    f"all-reduce of {ranks // shard}": [groups, found["of matrices"] // shard],
                }
