"""A streamed run that is killed and goes on with other ranks and workers sees the tokens of one that is not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import runs
from tests.processes.test_torchrun import kill

STREAMED = ("data.streaming=true", "data.streams=24", "data.open_shards=2", "train.batch_rows=24", "train.micro_rows=2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_parquet_shards(tmp_path_factory.mktemp("text") / "text", (90, 13, 200, 41, 77))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run of 24 steps that nothing happens to."""
    directory = tmp_path_factory.mktemp("whole")
    runs.train(runs.arguments(directory, text, *STREAMED, "train.steps=24", "train.micro_rows=12", "data.workers=0"))
    return directory / "runs/test"


def data_hashes(directory: Path) -> dict[int, str]:
    return {step: record["data_hash"] for step, record in runs.records(directory).items()}


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Data workers of all trainers below a process."""
    parents, found = [process.pid], []
    while parents:
        listed = subprocess.run(["pgrep", "-P", str(parents.pop())], capture_output=True, text=True, check=False).stdout
        parents += map(int, listed.split())
        found += map(int, listed.split())
    return [pid for pid in found if b"--multiprocessing-fork" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail("a data worker outlives its trainer")
        time.sleep(0.1)


def output_of(process: subprocess.Popen[str], workers: list[int], seconds: float) -> str:
    """What a run has said when it has ended and no worker of it can say more, which must be so in so many seconds."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *workers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.slow
def test_killed_and_resumed_on_other_ranks(tmp_path: Path, text: Path, whole: Path) -> None:
    """kill -9 between checkpoints on two ranks with two workers each; then one rank that tokenizes itself."""
    parts = runs.arguments(tmp_path / "parts", text, *STREAMED, "train.steps=24", "checkpoint.every=5")
    process = runs.start([*parts, "data.workers=2"], ranks=2)
    directory = tmp_path / "parts/runs/test"
    runs.wait_for_step(directory, 7)
    workers = workers_of(process)
    assert len(workers) == 4
    kill(process)
    assert_gone(workers)
    assert not (directory / "exit.json").exists(), "killed too late to show anything"
    runs.train([*parts, "data.workers=0"])
    assert len(runs.starts(directory)) == 2
    expected = data_hashes(whole)
    assert data_hashes(directory) == expected
    assert len(set(expected.values())) == 24
    losses = {step: record["loss"] for step, record in runs.records(directory).items()}
    assert losses == pytest.approx({s: r["loss"] for s, r in runs.records(whole).items()}, rel=1e-4)
    assert losses[24] < 0.95 * losses[1]


@pytest.mark.slow
def test_one_rank_is_killed(tmp_path: Path, text: Path, whole: Path) -> None:
    """kill -9, as a lack of memory does. Caught: workers that live on without their trainer, even one that is stopped
    and hears nothing. A worker that is killed: tests/unit/data/test_bad_input.py."""
    given = runs.arguments(tmp_path, text, *STREAMED, "train.steps=24", "checkpoint.every=5", "data.workers=1")
    process = runs.start(given, ranks=2)
    directory = tmp_path / "runs/test"
    runs.wait_for_step(directory, 5)
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    trainer = int(Path(f"/proc/{workers[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(trainer, signal.SIGKILL)
    output_of(process, workers, 90)
    if directory.joinpath("exit.json").exists() and runs.end_of(directory)["code"] == 0:
        pytest.skip("the run was over before it was killed")
    assert process.returncode != 0
    assert_gone(workers)
    runs.train(given)
    assert data_hashes(directory) == data_hashes(whole)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupted_run_leaves_no_worker(tmp_path: Path, text: Path, number: signal.Signals) -> None:
    """To all processes at once, as Ctrl-C and many launchers do. Caught: a run that ends without its checkpoint."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup")
    given = runs.arguments(tmp_path, text, *STREAMED, "train.steps=2000", "data.workers=2")
    process = runs.start(given)
    runs.wait_for_step(tmp_path / "runs/test", 3)
    workers = workers_of(process)
    assert len(workers) == 2
    os.killpg(process.pid, number)
    output = output_of(process, workers, 60)
    assert process.returncode == 0, output
    assert "saved at step" in output
    assert_gone(workers)


@pytest.mark.slow
def test_a_worker_that_is_stopped_holds_up_no_signal(tmp_path: Path, text: Path) -> None:
    """Caught: a trainer that waits for rows and hears no SIGTERM."""
    given = runs.arguments(tmp_path, text, *STREAMED, "train.steps=100000", "data.workers=1", "checkpoint.every=0")
    process = runs.start(given)
    directory = tmp_path / "runs/test"
    runs.wait_for_step(directory, 3)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGSTOP)
    deadline, steps = time.monotonic() + 60, -1
    while (now := max(runs.records(directory))) > steps:  # until the blocks that it had sent are used up
        assert time.monotonic() < deadline
        steps = now
        time.sleep(3)
    process.terminate()
    output = output_of(process, [worker], 30)
    assert process.returncode == 0, output
    assert f"saved at step {steps}" in output
    assert_gone([worker])


@pytest.mark.slow
def test_a_worker_that_is_stopped_ends_the_wait(tmp_path: Path, text: Path) -> None:
    """Caught: a wait without an end."""
    given = runs.arguments(tmp_path, text, *STREAMED, "train.steps=100000", "data.workers=1", "data.fetch_minutes=0.05")
    process = runs.start(given)
    runs.wait_for_step(tmp_path / "runs/test", 3)
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGSTOP)
    output = output_of(process, [worker], 90)
    assert process.returncode == 3, output
    assert "minutes for a row, twice data.fetch_minutes: a data worker is stopped or stuck" in output
    assert_gone([worker])


@pytest.mark.slow
def test_interrupted_while_workers_start(tmp_path: Path, text: Path) -> None:
    """Caught: an interrupt that ends a worker before it has read what its trainer is writing to it."""
    process = runs.start(
        runs.arguments(tmp_path, text, *STREAMED, "train.steps=2000", "data.workers=2", "tokenizer=gpt2")
    )
    runs.wait_for(lambda: workers_of(process), 60)
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    output = output_of(process, workers, 60)
    assert process.returncode in (0, 130), output
    assert_gone(workers)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    text = runs.write_parquet_shards(tmp_path / "text", (30, 30, 30))
    damaged = text / "train-00002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-200] + bytes(200))
    options = [*STREAMED, "data.streams=6", "data.open_shards=1", "data.workers=1"]
    options += ["train.steps=40", "train.batch_rows=6", "train.micro_rows=6"]
    finished = runs.run("train", runs.arguments(tmp_path, text, *options), code=3)
    assert "train-00002.parquet: damaged" in finished.stderr
    assert "Traceback" not in finished.stderr
    runs.train([*runs.arguments(tmp_path, text, *options), "data.on_bad_shard=skip"])
    log = (tmp_path / "runs/test/logs/rank_0.log").read_text()
    assert "leaves out train-00002.parquet" in log
    state = json.loads(next((tmp_path / "runs/test/checkpoints").glob("*40/state.json")).read_text())
    assert list(state["data"]["skipped_shards"]) == ["train-00002.parquet"]
