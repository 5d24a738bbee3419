"""Ranks that hold the same weights compare them."""

from pathlib import Path

import pytest
import torch

from tests.processes.launch import launch


@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_a_flipped_bit_and_a_swap_are_found(tmp_path: Path, parallel: str, ranks: int) -> None:
    """Caught: a weight or a moment of one rank that differs in its last bit; elements that have changed places; a false
    alarm for running statistics of ranks, or for the rows of a matrix that only one rank has."""
    reports = [torch.load(path) for path in launch("replicas_worker.py", tmp_path / "out", ranks, parallel)]
    assert all(report == reports[0] for report in reports), "all ranks end together"
    found, vector, matrix = (reports[0][name] for name in ("found", "vector", "matrix"))
    expected = {"vector": vector, "moment": f"exp_avg_sq of {vector}"}
    expected |= {"swapped": vector, "swapped with another tensor": vector}
    if parallel != "fsdp":
        expected["matrix"] = matrix
    assert found.keys() == expected.keys()
    # Groups of HSDP are ranks 0 and 1, 2 and 3: ranks 1 and 3 have the same shards.
    for place, name in expected.items():
        blamed = "ranks 1 and 3" if (parallel, place) == ("hsdp", "matrix") else "ranks 0 and 1"
        assert found[place].startswith(f"step 3: {name} differs between {blamed}")
