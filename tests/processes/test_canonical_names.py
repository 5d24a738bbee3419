"""A checkpoint holds weights, moments and averages under canonical names, whatever the layout; those of before load."""

from pathlib import Path

import pytest
import torch

from ngpt_train.training.checkpoint import load_state
from tests.processes.launch import launch
from tests.processes.names_worker import built, whole
from tests.stored import stored_tensors

FAST = [("gpt", "single", 1), ("ngpt", "fsdp", 3), ("normformer", "ddp", 2)]
SLOW = [("powernorm", "fsdp", 3), ("normformer", "hsdp", 4), ("gpt_encoder_decoder", "fsdp", 3)]


@pytest.mark.parametrize(
    ("name", "parallel", "ranks"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_names_and_shapes(name: str, parallel: str, ranks: int, tmp_path: Path) -> None:
    """In any layout, on other ranks too. Caught: fused matrices, parts cut at other rows, a rank whose rows of a part
    are lost, a checkpoint of before that loads no more, or not to the bit."""
    reports = [
        torch.load(path, weights_only=False)
        for path in launch("names_worker.py", tmp_path / "out", ranks, name, parallel, str(tmp_path))
    ]
    assert all(report["sharded"] == (parallel in ("fsdp", "hsdp")) for report in reports)
    expected = reports[0]["whole"]
    stored = stored_tensors(tmp_path / "canonical/step_00000003")
    assert stored.keys() - {"statistics"} == {"model", "exp_avg", "exp_avg_sq", "step", "ema"}
    for kind, tensors in expected.items():
        assert stored[kind].keys() == tensors.keys()
        assert all(torch.equal(stored[kind][key], x) for key, x in tensors.items()), kind
    assert {"embedding", "layers.0.wq", "layers.0.wk", "layers.0.w_down"} <= stored["model"].keys()
    for report in reports:
        assert report["canonical"] == report["before"] == []
        assert report["canonical: goes on"]
        assert report["before: goes on"]
    for names in ("canonical", "before"):
        alone = built(name, "single")
        load_state(tmp_path / names / "step_00000003", alone)
        assert whole(alone).keys() == expected.keys()
        for kind, tensors in whole(alone).items():
            assert all(torch.equal(x, expected[kind][key]) for key, x in tensors.items()), (names, kind)
