"""The bytes that a compiled block moves on a fake GPU, counted by torch's compiler itself.

The numbers belong to one version of torch: another one may fuse otherwise, and is to be counted anew.
"""

import importlib.metadata
import json
import re
from typing import Any

import pytest
import torch

from tests.unit.kernels.own_process import ROOT, printed_by

[PINNED] = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
VERSION = importlib.metadata.version("torch").split("+")[0]
# Bytes a token and layer outside of matrix products and attention, in units of d_model.
RECORDED = {"GPT": 124.1, "nGPT": 124.1, "GPT, compile only": 126.1, "nGPT, compile only": 298.8}
CASES = [("H100", 1024), ("A100", 1280)]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(VERSION != PINNED, reason=f"counted with torch {PINNED}, this is {VERSION}"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA does not take a GPU that is not there"),
]

Passes = list[dict[str, Any]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, d {case[1]}")
def counted(request: pytest.FixtureRequest) -> dict[str, Passes]:
    gpu, d = request.param
    return json.loads(printed_by("moved_bytes", "--json", "--gpu", gpu, "--d-model", str(d)))


def moved(passes: Passes) -> float:
    return sum(one["moved"] for one in passes if one["kind"] == "activations")


def test_all_of_a_block_is_counted(counted: dict[str, Passes]) -> None:
    """Caught: a count of half a block, or of another than the one with kernels, which everything below would pass."""
    for form, passes in counted.items():
        kinds = [(one["where"], one["kind"]) for one in passes]
        assert kinds.count(("forward", "product")) == 4, form
        assert kinds.count(("backward", "product")) == 8, form
        assert kinds.count(("forward", "attention")) == kinds.count(("backward", "attention")) == 1, form
        ours = [one["name"] for one in passes if one["name"].startswith("ngpt_train::")]
        assert len(ours) == {"GPT": 4, "nGPT": 8}.get(form, 0), ours
    # Hidden states are 2 bytes: a product of d_model columns by as many rows reads and writes one each.
    assert min(one["moved"] for one in counted["GPT"] if one["kind"] == "product") > 4


@pytest.mark.parametrize("form", RECORDED)
def test_bytes_of_a_block(counted: dict[str, Passes], form: str) -> None:
    """To 1 %. Caught: a copy, a cast or a sum that is a pass of its own, inside of the block or between blocks."""
    assert moved(counted[form]) == pytest.approx(RECORDED[form], rel=0.01), counted[form]


def test_ngpt_moves_what_gpt_does(counted: dict[str, Passes]) -> None:
    """Caught: what makes nGPT slower than GPT for good."""
    assert moved(counted["nGPT"]) <= 1.02 * moved(counted["GPT"])


def test_the_count_sees_what_is_not_fused(counted: dict[str, Passes]) -> None:
    """Caught: a count that says the same of every block."""
    assert moved(counted["nGPT, compile only"]) > 2 * moved(counted["nGPT"])
