"""One process = DDP = FSDP2: the same batch in other pieces gives the same run.

Caught: gradients summed for averaged, a loss divided per rank or per micro batch, accumulation without no_sync,
vectors not averaged, a projection of shards' columns, weights drawn per shard, a wrapper whose hooks do not run;
dropout's masks that depend on ranks or micro batches.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes.equality_worker import RECIPES
from tests.processes.launch import launch
from tests.properties.architectures import ARCHITECTURES

LAYOUTS = {  # ranks, parallel, micro batches per rank and step
    "ddp(2)": (2, "ddp", 2),
    "fsdp(2)": (2, "fsdp", 4),
    "fsdp(4)": (4, "fsdp", 2),
    "hsdp(2x2)": (4, "hsdp", 2),
}


def run(out: Path, name: str, ranks: int, parallel: str, accumulation: int) -> list[dict[str, Any]]:
    """What each rank reports."""
    reports = launch("equality_worker.py", out, ranks, name, parallel, str(accumulation))
    return [json.loads(report.read_text()) for report in reports]


@pytest.fixture(scope="module", params=RECIPES)
def single(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    name = request.param
    (report,) = run(tmp_path_factory.mktemp(name) / "single", name, 1, "single", 1)
    return name, report


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(single: tuple[str, dict[str, Any]], layout: str, tmp_path: Path) -> None:
    recipe, expected = single
    name = recipe.partition(" with ")[0]
    ranks = run(tmp_path / "run", recipe, *LAYOUTS[layout])
    for report in ranks:
        assert report["sharded"] == ("sdp" in layout)
        assert report["replicas"] == (2 if "hsdp" in layout else 1)
        assert report["initial"] == expected["initial"]
        assert report["held"] == ranks[0]["held"]
        assert report["tokens"] == expected["tokens"]
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert report["z_losses"] == pytest.approx(expected["z_losses"], rel=1e-5)
        # Of one gradient in other pieces 8 roundings of fp32. Later ones are at weights that Adam, which divides a
        # gradient by its own size, has moved by their roundings as well: in one process, with each operation moved by
        # one (tests/rounding.py), up to 115 were seen.
        assert report["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert report["norms"] == pytest.approx(expected["norms"], rel=512 * 2**-23)
        assert report["unmoved"] == expected["unmoved"] == []
        assert not ARCHITECTURES[name].on_sphere or report["off_sphere"] < 1e-6
    assert len(expected["z_losses"]) == (len(expected["losses"]) if name == "gpt" else 0)
    assert expected["losses"][-1] < 0.95 * expected["losses"][0]
    assert max(expected["norms"]) > RECIPES[name].clip_norm
