"""One process = DDP = FSDP2: the same batch in other pieces gives the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("equality_worker.py")
CLIP_NORM = {"gpt": 1.0, "ngpt": 0.5, "normformer": 1.0}
LAYOUTS = {  # ranks, parallel, micro batches per rank and step
    "ddp(2)": (2, "ddp", 2),
    "fsdp(2)": (2, "fsdp", 4),
    "fsdp(4)": (4, "fsdp", 2),
}


def launch(out: Path, name: str, ranks: int, parallel: str, accumulation: int) -> list[dict[str, Any]]:
    """What each rank reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    finished = subprocess.run(
        [*command, str(WORKER), str(out), name, parallel, str(accumulation)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=CLIP_NORM)
def single(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    name = request.param
    (run,) = launch(tmp_path_factory.mktemp(name) / "single", name, 1, "single", 1)
    return name, run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(single: tuple[str, dict[str, Any]], layout: str, tmp_path: Path) -> None:
    name, expected = single
    ranks = launch(tmp_path / "run", name, *LAYOUTS[layout])
    for run in ranks:
        assert run["sharded"] == ("fsdp" in layout)
        assert run["initial"] == expected["initial"]
        assert run["held"] == ranks[0]["held"]
        assert run["tokens"] == expected["tokens"]
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert run["norms"][:8] == pytest.approx(expected["norms"][:8], rel=1e-6)
        assert name != "ngpt" or run["off_sphere"] < 1e-6
    assert expected["losses"][-1] < 0.95 * expected["losses"][0]
    assert max(expected["norms"]) > CLIP_NORM[name]
