"""A check that hangs or crashes ends in time and alone, and keeps its facts."""

import os
import signal
import subprocess
import time

import pytest

from ngpt_train.doctor.bounded import Check, Report


def test_facts_come_back() -> None:
    def look(report: Report) -> None:
        report(cpus=2)
        print("output of a library stays out of the table")
        report(names=["a"])

    facts, problem, _ = Check(look, 10).result()
    assert facts == {"cpus": 2, "names": ["a"]}
    assert problem is None


def test_a_check_that_hangs() -> None:
    """Caught: a hang without an end; facts of before that are lost; a compiler that goes on for ever."""

    def look(report: Report) -> None:
        child = subprocess.Popen(["sleep", "100"])
        report(pid=child.pid)
        child.wait()

    begin = time.monotonic()
    facts, problem, _ = Check(look, 1).result()
    assert time.monotonic() - begin < 10
    assert problem is not None
    assert problem.startswith("it took longer than 1 s")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _lives(facts["pid"]):
        time.sleep(0.02)
    assert not _lives(facts["pid"])


def test_an_answer_that_is_fetched_late() -> None:
    """Caught: facts that came in time are lost, because other checks took long."""
    check = Check(lambda report: report(cpus=2), 0.3)
    time.sleep(0.6)
    assert check.result()[:2] == ({"cpus": 2}, None)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda report: os.kill(os.getpid(), signal.SIGSEGV), "it was ended by SIGSEGV"),
        (lambda report: {}["torch"], "KeyError: 'torch'"),
    ],
)
def test_a_check_that_crashes(look: object, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Caught: a traceback; a crash that ends the doctor."""
    facts, problem, _ = Check(look, 20).result()  # type: ignore[arg-type]
    assert facts == {}
    assert problem is not None
    assert problem.startswith(expected)
    assert capfd.readouterr() == ("", "")
