"""A rank that hangs is named, and ends the job, long before a collective gives up."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import fork_server
from tests.processes.runs import arguments, records, start, wait_for_step
from tests.processes.test_launcher import with_restarts, workers

SECONDS = 6.0
HANGING = """
import os, sys, time
from ngpt_train.training import loop
from ngpt_train.__main__ import main

take_step, first = loop.train_step, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def sleeping_beauty():
    time.sleep(10_000)

def step(state, *given, **options):
    if first and state.world.rank == 1 and state.step == 9:
        sleeping_beauty()
    return take_step(state, *given, **options)

loop.train_step = step
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_is_stopped(tmp_path: Path, corpus: Path) -> None:
    given = arguments(tmp_path, corpus, "train.steps=100000", f"parallel.hang_seconds={SECONDS}")
    process = start(given, ranks=2)
    wait_for_step(tmp_path / "runs/test", 5)
    pid = workers(process)[1]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    output = process.communicate(timeout=100)[0]
    # The watchdog's ten beats and its pauses, and torchrun's 30 seconds until it kills a rank that ignores SIGTERM.
    assert time.monotonic() - began < 2 * SECONDS + 45
    assert process.returncode != 0
    assert re.search(rf"hung: rank 1 \(process {pid} on \S+, in .*\) has given no sign of life for \d+ s", output)
    assert re.search(rf"rank 1 \(process {pid} .*:\n  no answer", output), output
    end = json.loads((tmp_path / "runs/test/exit.json").read_text())
    assert end["code"] == 1
    assert end["reason"].startswith("hung: rank 1 ")


@pytest.mark.slow
def test_a_rank_that_never_comes_back_from_a_step(tmp_path: Path, corpus: Path) -> None:
    """torchrun starts the ranks again, and nothing is lost or repeated."""
    program = tmp_path / "hanging.py"
    program.write_text(HANGING)
    given = arguments(tmp_path, corpus, "train.steps=14", f"parallel.hang_seconds={SECONDS}", "checkpoint.every=3")
    command = with_restarts(given, restarts=1)
    command[command.index("-m", 3) : command.index("train")] = [str(program)]
    finished = subprocess.run(
        command, env=fork_server.environment(), capture_output=True, text=True, check=False, timeout=150
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert re.search(r"hung: (step|what follows step) \d+ has taken \d+ s", finished.stderr), finished.stderr
    blamed = r"not waiting for others: rank 1 \(process \d+ on \S+, in step 10\)\. All ranks end"
    assert re.search(blamed, finished.stderr), finished.stderr
    stack = finished.stderr[finished.stderr.index("All ranks end") :]
    assert "in sleeping_beauty" in stack.split("rank 0")[0], "the culprit's stack comes first"
    assert sorted(records(tmp_path / "runs/test")) == list(range(1, 15))
    starts = json.loads((tmp_path / "runs/test/run.json").read_text())["starts"]
    assert [entry["step"] for entry in starts] == [0, 9]


@pytest.mark.slow
def test_a_long_validation_is_no_hang(tmp_path: Path, corpus: Path) -> None:
    """Caught: ranks that wait for another's validation, checkpoint or rows and take it for hung."""
    program = tmp_path / "slow.py"
    program.write_text(
        "import sys, time\n"
        "from ngpt_train.evaluation.validation import Evaluations\n"
        "from ngpt_train.__main__ import main\n"
        "losses = Evaluations.row_losses\n"
        "def slow(self, model, world, last):\n"
        "    if world.rank == 1: time.sleep(16)\n"
        "    return losses(self, model, world, last)\n"
        "Evaluations.row_losses = slow\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    given = arguments(tmp_path, corpus, "train.steps=9", "parallel.hang_seconds=8", "eval.every=8")
    command = with_restarts(given, restarts=0)
    command[command.index("-m", 3) : command.index("train")] = [str(program)]
    finished = subprocess.run(
        command, env=fork_server.environment(), capture_output=True, text=True, check=False, timeout=150
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "hung" not in finished.stderr
