"""One process = DDP = FSDP2 = HSDP: the same batch in other pieces gives the same run.

Caught: gradients summed for averaged, a loss divided per rank or per micro batch, accumulation without no_sync,
vectors not averaged, a projection of shards' columns, weights drawn per shard, a wrapper whose hooks do not run;
dropout's masks that depend on ranks or micro batches; PowerNorm's statistics of a rank's own rows, or that a
recomputation advances again.
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
    "ddp(4)": (4, "ddp", 1),
    "fsdp(2)": (2, "fsdp", 4),
    "fsdp(4)": (4, "fsdp", 2),
    "hsdp(2x2)": (4, "hsdp", 2),
}
FAST = {  # with the other recipes and cells in the exhaustive tier
    "gpt": {"ddp(2)": "none", "fsdp(4)": "none", "hsdp(2x2)": "selective"},
    "ngpt": {"ddp(2)": "selective", "ddp(4)": "none", "fsdp(2)": "none", "hsdp(2x2)": "none"},
    "ngpt with nugpt": {"ddp(2)": "none", "fsdp(2)": "none", "hsdp(2x2)": "none"},
    "ntransformer with dropout": {"fsdp(2)": "full"},
    "composed_encoder_decoder": {"ddp(2)": "none"},
    "powernorm": {"ddp(2)": "none", "hsdp(2x2)": "full"},
}
Report = dict[str, Any]


def run(out: Path, recipe: str, ranks: int, runs: list[tuple[str, str, int]]) -> list[list[Report]]:
    """For each (parallel, recomputation, micro batches): what each rank reports."""
    names = [f"{parallel}:{recomputation}:{accumulation}" for parallel, recomputation, accumulation in runs]
    reports = [json.loads(path.read_text()) for path in launch("equality_worker.py", out, ranks, recipe, *names)]
    return [[report[name] for report in reports] for name in names]


def micro_batches(recipe: str, otherwise: int) -> int:
    """PowerNorm's statistics advance with each micro batch: so it is given the same ones in every layout."""
    return 2 if recipe == "powernorm" else otherwise


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """By recipe, what one process reports; filled by `single`."""
    return {}


def single(singles: dict[str, Report], recipe: str, directory: Path) -> Report:
    if recipe not in singles:
        [[singles[recipe]]] = run(directory / "single", recipe, 1, [("single", "none", micro_batches(recipe, 1))])
    return singles[recipe]


def assert_equal(recipe: str, layout: str, ranks: list[Report], expected: Report) -> None:
    name = recipe.partition(" with ")[0]
    for report in ranks:
        assert report["sharded"] == ("sdp" in layout)
        assert report["replicas"] == (2 if "hsdp" in layout else 1)
        assert report["initial"] == expected["initial"]
        assert report["held"] == ranks[0]["held"]
        assert report["tokens"] == expected["tokens"]
        assert report["rates"] == expected["rates"]
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert report["z_losses"] == pytest.approx(expected["z_losses"], rel=1e-5)
        # Of one gradient in other pieces 8 roundings of fp32. Later ones are at weights that Adam, which divides a
        # gradient by its own size, has moved by their roundings as well: in one process, with each operation moved by
        # one (tests/rounding.py), up to 115 were seen.
        assert report["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert report["norms"] == pytest.approx(expected["norms"], rel=512 * 2**-23)
        assert report["statistics"] == pytest.approx(expected["statistics"], rel=1e-4)
        assert report["unmoved"] == expected["unmoved"] == []
        assert not ARCHITECTURES[name].on_sphere or report["off_sphere"] < 1e-6
    assert len(expected["z_losses"]) == (len(expected["losses"]) if name == "gpt" else 0)
    assert bool(expected["statistics"]) == (name == "powernorm")
    assert expected["losses"][-1] < 0.95 * expected["losses"][0]
    assert max(expected["norms"]) > RECIPES[recipe].clip_norm
    assert min(expected["rates"]) > 0


@pytest.mark.parametrize(
    ("recipe", "layout", "recomputation"),
    [pytest.param(recipe, *cell, id="-".join((recipe, *cell))) for recipe in FAST for cell in FAST[recipe].items()],
)
def test_layouts_agree(
    singles: dict[str, Report], recipe: str, layout: str, recomputation: str, tmp_path: Path
) -> None:
    expected = single(singles, recipe, tmp_path)
    n_ranks, parallel, accumulation = LAYOUTS[layout]
    cell = (parallel, recomputation, micro_batches(recipe, accumulation))
    (ranks,) = run(tmp_path / "run", recipe, n_ranks, [cell])
    assert_equal(recipe, layout, ranks, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_cell(singles: dict[str, Report], recipe: str, n_ranks: int, tmp_path: Path) -> None:
    """All layouts of as many ranks, with nothing, some and all of it recomputed, one after the other in one launch."""
    expected = single(singles, recipe, tmp_path)
    cells = {
        (layout, recomputation): (parallel, recomputation, micro_batches(recipe, accumulation))
        for layout, (ranks, parallel, accumulation) in LAYOUTS.items()
        if ranks == n_ranks
        for recomputation in ("none", "selective", "full")
    }
    found = run(tmp_path / "run", recipe, n_ranks, list(cells.values()))
    for (layout, _), ranks in zip(cells, found, strict=True):
        assert_equal(recipe, layout, ranks, expected)
