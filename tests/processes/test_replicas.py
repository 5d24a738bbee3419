"""Ranks that hold the same weights compare them."""

from pathlib import Path

import pytest
import torch

from tests.processes.launch import launch


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_flipped_bit_is_found(tmp_path: Path, parallel: str) -> None:
    """Caught: a weight or a moment of one rank that differs in its last bit; a false alarm for running statistics of
    ranks, or for the rows of a matrix that only one rank has."""
    reports = [torch.load(path) for path in launch("replicas_worker.py", tmp_path / "out", 2, parallel)]
    assert reports[0] == reports[1], "all ranks end together"
    found, vector, matrix = (reports[0][name] for name in ("found", "vector", "matrix"))
    expected = {"vector": vector, "moment": f"exp_avg_sq of {vector}"} | (
        {"matrix": matrix} if parallel == "ddp" else {}
    )
    assert found.keys() == expected.keys()
    for place, name in expected.items():
        assert found[place].startswith(f"step 3: {name} on rank 1 is not what it is on rank 0")
