"""A rank that hangs is named, and ends the job, long before a collective gives up."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.processes.runs import arguments, began_at, children, end_of, records, start, wait_for_step

SECONDS = 6.0


@pytest.mark.slow
def test_a_rank_that_is_stopped(tmp_path: Path, corpus: Path) -> None:
    given = arguments(tmp_path, corpus, "train.steps=100000", f"parallel.hang_seconds={SECONDS}")
    process = start(given, ranks=2)
    wait_for_step(tmp_path / "runs/test", 5)
    pid = children(process)[1]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    output = process.communicate(timeout=100)[0]
    # The watchdog's ten beats and its pauses, and torchrun's 30 seconds until it kills a rank that ignores SIGTERM.
    assert time.monotonic() - began < 2 * SECONDS + 45
    assert process.returncode != 0
    assert re.search(rf"hung: rank 1 \(process {pid} on \S+, in .*\) has given no sign of life for \d+ s", output)
    assert re.search(rf"rank 1 \(process {pid} .*:\n  no answer", output), output
    end = end_of(tmp_path / "runs/test")
    assert end["code"] == 1
    assert end["reason"].startswith("hung: rank 1 ")


@pytest.mark.slow
def test_a_rank_that_never_comes_back_from_a_step(tmp_path: Path, corpus: Path) -> None:
    """torchrun starts the ranks again, and nothing is lost or repeated."""
    given = arguments(tmp_path, corpus, "train.steps=14", f"parallel.hang_seconds={SECONDS}", "checkpoint.every=3")
    process = start(given, 2, 1, ("tests.processes.faulty", "hanging", "train"))
    output = process.communicate(150)[0]
    assert process.returncode == 0, output[-3000:]
    assert re.search(r"hung: (step|what follows step) \d+ has taken \d+ s", output), output
    blamed = r"not waiting for others: rank 1 \(process \d+ on \S+, in step 10\)\. All ranks end"
    assert re.search(blamed, output), output
    stack = output[output.index("All ranks end") :]
    assert "in sleeping_beauty" in stack.split("rank 0")[0], "the culprit's stack comes first"
    assert sorted(records(tmp_path / "runs/test")) == list(range(1, 15))
    assert began_at(tmp_path / "runs/test") == [0, 9]


@pytest.mark.slow
def test_a_long_validation_is_no_hang(tmp_path: Path, corpus: Path) -> None:
    """Caught: ranks that wait for another's validation, checkpoint or rows and take it for hung."""
    given = arguments(tmp_path, corpus, "train.steps=9", "parallel.hang_seconds=6", "eval.every=8")
    process = start(given, 2, program=("tests.processes.faulty", "slow_validation", "train"))
    output = process.communicate(150)[0]
    assert process.returncode == 0, output[-3000:]
    assert "slow row_losses" in output
    assert "hung" not in output
