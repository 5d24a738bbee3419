"""Runs under a torchrun that dies, or starts its processes again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.__main__ import main
from ngpt_train.core.errors import ConfigError, DataError, is_told_here, same_on_host, told_by_rank_0
from ngpt_train.core.launcher import check_ranks, is_same_job, nameless_on_many_hosts, this_job
from tests.processes import fork_server, runs


def job(
    torchrun: str | None = None, agent: str | None = None, slurm: str | None = None, requeued: int = 0
) -> dict[str, Any]:
    environment = {
        "TORCHELASTIC_RUN_ID": torchrun,
        "TORCHELASTIC_ERROR_FILE": agent and f"/tmp/{agent}/attempt_{requeued}/0/error.json",
        "SLURM_JOB_ID": slurm,
        "SLURM_RESTART_COUNT": str(requeued) if requeued else None,
    }
    return this_job({name: value for name, value in environment.items() if value is not None})


@pytest.mark.parametrize(
    ("earlier", "now", "same"),
    [
        (job(), job(), False),  # two commands of a user
        (job("none", "a"), job("none", "a", requeued=1), True),  # a restart by the same torchrun
        (job("none", "a"), job("none", "b"), False),  # two torchruns without a name
        (job("none", "a"), job(), False),
        (job(), job("none", "a"), False),
        (job("big", "a"), job("big", "b"), True),  # a named job, whose rank 0 is on another host now
        (job("big", "a"), job("small", "b"), False),
        (job(slurm="7"), job(slurm="7", requeued=1), True),
        (job(slurm="7", requeued=1), job(slurm="7", requeued=2), True),
        (job(slurm="7"), job(slurm="7"), False),  # two commands in one allocation
        (job(slurm="7"), job(slurm="8", requeued=1), False),
        (job("none", "a", slurm="7"), job("none", "b", slurm="7", requeued=1), True),
        (None, job("big"), False),  # a run of before jobs were noted
    ],
)
def test_restarts_are_told_from_new_jobs(earlier: dict[str, object] | None, now: dict[str, object], same: bool) -> None:
    """Caught: a restart taken for a new job, which would delete its own run; a new job taken for a restart."""
    assert is_same_job(earlier, now) is same


@pytest.mark.parametrize(
    "damaged", ["big", [], {}, {"torchrun": "big"}, {**job(), "requeued": "1"}, {**job(), "slurm": 7}]
)
def test_a_job_that_is_damaged(damaged: Any) -> None:
    """Caught: a traceback; a run that is overwritten because its job cannot be read."""
    with pytest.raises(DataError, match=r"run\.json is damaged: its last job is"):
        is_same_job(damaged, this_job({}))


def test_nameless_jobs_of_many_hosts() -> None:
    assert nameless_on_many_hosts({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"})
    assert not nameless_on_many_hosts({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"})
    assert not nameless_on_many_hosts({"TORCHELASTIC_RUN_ID": "big", "GROUP_WORLD_SIZE": "2"})
    assert not nameless_on_many_hosts({})


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: .* no number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: .* no number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK=: .* no number"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5, WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 .* not RANK"),
        ({"SLURM_RESTART_COUNT": "often"}, "SLURM_RESTART_COUNT=often: .* no number\n  Start with sbatch"),
        ({"GROUP_WORLD_SIZE": "2.5"}, "GROUP_WORLD_SIZE=2.5: .* no number"),
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None),
    ],
)
def test_ranks_of_the_environment(environment: dict[str, str], problem: str | None) -> None:
    if problem is None:
        check_ranks(environment)
    else:
        with pytest.raises(ConfigError, match=problem):
            check_ranks(environment)


def test_who_tells_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: an error of one rank that nobody tells, and one of all ranks that all tell."""

    def tellers(error: Exception) -> list[str]:
        told = []
        for rank, local_rank in (("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")):  # two hosts
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", local_rank)
            told += [rank] if is_told_here(error) else []
        return told

    assert tellers(DataError("its disk is full")) == ["0", "1", "2", "3"]
    assert tellers(told_by_rank_0(DataError("found by rank 0"))) == ["0"]
    with pytest.raises(ConfigError) as caught, same_on_host():
        raise ConfigError("a typing error")
    assert tellers(caught.value) == ["0", "2"]


def test_the_rank_that_tells_an_error_ends_first(tmp_path: Path, corpus: Path) -> None:
    """Caught: rank 1, which leaves the telling to rank 0, ends before that, whereupon torchrun ends rank 0 unheard."""
    noted = tmp_path / "end.json"
    variables = fork_server.rank_variables(2)[1] | {"NGPT_TRAIN_END": str(noted)}
    with (tmp_path / "output").open("w+") as output:
        given = ["train", *runs.arguments(tmp_path, corpus, "train.batch_rows=5")]
        rank = fork_server.Forked("ngpt_train", given, variables, output.fileno(), output.fileno())
        runs.wait_for(noted.exists, 60)
        assert rank.wait(1) is None
        os.kill(rank.pid, signal.SIGTERM)
        assert rank.wait(5) == -signal.SIGTERM, "it waits no longer than torchrun lets it"
        assert not output.read()


def test_a_rank_that_has_no_device_says_so(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: exit code 2 of a rank other than 0, without a word."""

    def none(device: str, local_rank: int) -> None:
        assert local_rank == 1
        raise ConfigError("train.device=cuda: no GPU for me")

    monkeypatch.setattr("ngpt_train.verbs.train.resolve_device", none)
    for name, value in fork_server.rank_variables(2)[1].items():
        monkeypatch.setenv(name, value)
    assert main(["train", *runs.arguments(tmp_path, corpus)]) == 2
    said = capsys.readouterr().err
    assert "error (rank 1, " in said
    assert "no GPU for me" in said


def test_checkpoints_that_are_gone(tmp_path: Path, corpus: Path) -> None:
    """Caught: a run whose file system is not mounted, which begins anew and cuts its metrics."""
    given = runs.arguments(tmp_path, corpus)
    runs.train([*given, "train.stop_at=8"])
    directory = tmp_path / "runs/test"
    before = (directory / "metrics.jsonl").read_bytes()
    (directory / "checkpoints").rename(tmp_path / "elsewhere")
    for there in (False, True):  # a mount point that is gone, or empty
        if there:
            (directory / "checkpoints").mkdir()
        finished = runs.run("train", given, code=3)
        assert "step 8 was saved, but there is no checkpoint in" in finished.stderr
        assert (directory / "metrics.jsonl").read_bytes() == before
    (directory / "checkpoints").rmdir()
    (tmp_path / "elsewhere").rename(directory / "checkpoints")
    (directory / "checkpoints/step_00000008/MANIFEST.json").unlink()
    finished = runs.run("train", given, code=0)
    assert "step_00000008 is left out: it has no MANIFEST.json" in finished.stderr
    assert "step 8 was saved, but its checkpoint is gone; the run goes on from step 4" in finished.stderr
    assert sorted(runs.numbers(directory)) == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_ranks_end_with_their_torchrun(tmp_path: Path, corpus: Path, number: int) -> None:
    """Caught: ranks that train on without their launcher and hold the directory."""
    given = runs.arguments(tmp_path, corpus, "train.steps=2000", "checkpoint.every=0", "train.batch_rows=32")
    process = runs.start(given, ranks=2)
    directory = tmp_path / "runs/test"
    runs.wait_for_step(directory, 3)
    pids = runs.children(process)
    assert len(pids) == 2
    refused = runs.run("train", given, code=2)
    assert f"process {pids[0]} on " in refused.stderr or f"process {pids[1]} on " in refused.stderr
    process.send_signal(number)
    process.wait()
    runs.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60, "a rank outlives its launcher")
    ended = runs.end_of(directory)
    assert (ended["code"], ended["reason"]) == (0, "stopped by SIGTERM")
    assert (directory / f"checkpoints/step_{ended['step']:08d}").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_restart_does_not_overwrite_again(tmp_path: Path, corpus: Path, local_rank: int) -> None:
    """Caught: run.overwrite=true under --max-restarts, which deletes what the job itself has trained; a restart that
    connects to the dead process, whose address torchrun's store still has."""
    given = runs.arguments(tmp_path, corpus, "train.steps=30", "checkpoint.every=5", "train.batch_rows=16")
    directory = tmp_path / "runs/test"
    runs.train([*given, "train.stop_at=5"])  # of another job, and to be overwritten
    process = runs.start([*given, "run.overwrite=true"], ranks=2, restarts=1)
    runs.wait_for((directory / "checkpoints/step_00000010").is_dir, 120)
    os.kill(runs.children(process)[local_rank], signal.SIGKILL)  # type: ignore[arg-type]
    assert process.wait(timeout=200) == 0
    first, second = runs.began_at(directory)
    assert first == 0
    assert second >= 10
    assert sorted(runs.records(directory)) == list(range(1, 31))


@pytest.mark.slow
def test_an_end_that_would_come_again_is_no_reason_to_start_again(tmp_path: Path, corpus: Path) -> None:
    given = runs.arguments(tmp_path, corpus, "model=gpt", "optim.lr=1000", "train.steps=40")
    process = runs.start(given, ranks=2, restarts=2)
    output = process.communicate()[0]
    assert process.returncode != 0
    assert output.count("not started again, because it would end as before: 10 steps in a row") >= 2
    directory = tmp_path / "runs/test"
    assert len(runs.starts(directory)) == 1
    ended = runs.end_of(directory)
    assert (ended["code"], ended["rank"]) == (4, 0)


def test_a_change_that_is_allowed_is_recorded(tmp_path: Path, corpus: Path) -> None:
    """Caught: a new learning rate that the optimizer does not get, one that leaves no trace, one that must be allowed
    again."""
    given = runs.arguments(tmp_path, corpus, "train.steps=8")
    runs.train([*given, "train.stop_at=4"])
    refused = runs.run("train", [*given, "optim.lr=1e-3"], code=2)
    assert "run.allow_change=[optim.lr]" in refused.stderr
    runs.train([*given, "optim.lr=1e-3", "run.allow_change=[optim.lr]", "train.stop_at=6"])
    runs.train([*given, "optim.lr=1e-3"])
    rates = {step: record["lr"] for step, record in runs.records(tmp_path / "runs/test").items()}
    assert rates[4] > 5e-3 > 1e-3 > rates[5] > rates[8] > 0
    _, changed, after = runs.starts(tmp_path / "runs/test")
    assert changed["changed"] == [{"key": "optim.lr", "from": 0.02, "to": 1e-3}]
    assert "changed" not in after
