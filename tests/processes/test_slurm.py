"""scripts/slurm/train.sh beside a Slurm that is made of three small scripts."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import fork_server
from tests.processes.runs import arguments, end_of, records, wait_for_step

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/slurm/train.sh"
FAKES = {
    # srun OPTIONS COMMAND...: its process becomes the command's.
    "srun": 'echo $$ > "$FAKES/step"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": 'if [[ $1 == show ]]; then echo localhost; else echo "$@" >> "$FAKES/requeued"; fi\n',
    "scancel": 'kill -TERM "$(cat "$FAKES/step")"\n',
}


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    directory = tmp_path / "fakes"
    directory.mkdir()
    for name, body in FAKES.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}")
        (directory / name).chmod(0o755)
    return directory


def start(fakes: Path, given: list[str], restarts: int = 0, ranks: int = 1) -> subprocess.Popen[str]:
    variables = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_RESTART_COUNT": str(restarts),
        "FAKES": str(fakes),
        "GPUS": str(ranks),
        "PYTHON": sys.executable,
        "PATH": f"{fakes}:{os.environ['PATH']}",
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT), *given],
        env=fork_server.environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def requeued(fakes: Path) -> int:
    file = fakes / "requeued"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_the_script_has_no_known_mistake() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([str(shellcheck), str(SCRIPT)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_a_job_without_a_name_is_refused(fakes: Path) -> None:
    process = start(fakes, ["model=ngpt", "run.name=x"])
    assert "give run.root=DIRECTORY" in process.communicate(timeout=100)[0]
    assert process.returncode == 2


@pytest.mark.slow
def test_a_job_that_is_queued_again_at_its_time_limit(fakes: Path, tmp_path: Path, corpus: Path) -> None:
    """Caught: steps that are lost or repeated, a job that is not queued again, one that overwrites its own run."""
    given = arguments(tmp_path, corpus, "train.steps=60", "checkpoint.every=0", "train.batch_rows=16")
    process = start(fakes, [*given, "run.overwrite=true"], ranks=2)
    wait_for_step(tmp_path / "runs/test", 4)
    os.kill(process.pid, signal.SIGUSR1)  # as --signal=B:USR1@300 does
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    assert "queued again: stopped by SIGTERM" in output
    assert requeued(fakes) == 1
    last = end_of(tmp_path / "runs/test")["step"]
    assert 4 <= last < 60
    process = start(fakes, [*given, "run.overwrite=true"], restarts=1, ranks=2)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    assert f"resumed at step {last}" in output
    assert output.strip().splitlines()[-1] == "train.sh: done"
    assert requeued(fakes) == 1
    assert sorted(records(tmp_path / "runs/test")) == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("optim.lr=1000", 4, "10 steps in a row"),
        ("data.path=/nowhere", 3, "no such file or directory"),
        ("model.n_heads=3", 2, "the heads do not divide the width"),
    ],
)
def test_an_end_that_would_come_again(
    fakes: Path, tmp_path: Path, corpus: Path, override: str, code: int, message: str
) -> None:
    """Caught: a job that is queued again for ever with the same mistake."""
    process = start(fakes, arguments(tmp_path, corpus, "model=gpt", override, "train.steps=30"))
    output = process.communicate(timeout=200)[0]
    assert process.returncode == code, output
    assert message in output
    assert f"not started again, because it would end as before (exit code {code})" in output
    assert requeued(fakes) == 0


@pytest.mark.slow
def test_a_crash_is_queued_again(fakes: Path, tmp_path: Path, corpus: Path) -> None:
    given = arguments(tmp_path, corpus, "train.steps=2000", "checkpoint.every=5")
    process = start(fakes, given)
    wait_for_step(tmp_path / "runs/test", 6)
    os.kill(int((fakes / "step").read_text()), signal.SIGKILL)  # torchrun: a node that goes down
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    assert "queued again: " in output
    assert requeued(fakes) == 1
    time.sleep(3)  # for the ranks, which end after their launcher
    shutil.rmtree(tmp_path / "runs")
