"""RowAdam on shards: the same weights as on one process, and not a word between the ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.launch import launch


def reports(out: Path, ranks: int, parallel: str) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in launch("sharded_rows_worker.py", out, ranks, parallel)]


def test_shards_equal_one_process(tmp_path: Path) -> None:
    """Caught: a rank without rows that forgets its step, moments of another shard, lengths of parts of rows, a norm or
    a step count that ranks exchange. (That it launches no kernel shows on a GPU alone.)"""
    (single,) = reports(tmp_path / "single", 1, "single")
    ranks = reports(tmp_path / "fsdp", 2, "fsdp")
    assert not single["model"]["sharded"]
    assert single["matrices"]["counted"] == 0
    assert [rank["matrices"]["rows held"] for rank in ranks] == [[4, 3, 1], [4, 2, 0]]
    for rank in ranks:
        model, matrices = rank["model"], rank["matrices"]
        assert model["sharded"]
        assert model["collectives"] == [0, 0, 0]
        assert matrices["counted"] >= 3
        assert model["losses"] == pytest.approx(single["model"]["losses"], rel=1e-6)
        for key, x in single["model"]["weights"].items():
            assert (model["weights"][key] - x).norm() <= 1e-4 * x.norm(), key  # the ranks' sums round otherwise
        for key, x in single["matrices"]["weights"].items():
            assert torch.equal(matrices["weights"][key], x), key
            torch.testing.assert_close(x.norm(dim=1), torch.ones(len(x)))
        assert matrices["steps"] == [3, 3, 3]
        assert matrices["unchanged by the skipped step"]
