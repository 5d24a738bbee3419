"""`doctor` as a user meets it: the faults of a machine, and of two hosts, named with their mending."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import fork_server
from tests.processes.runs import arguments, command, run


def given(directory: Path, corpus: Path, *overrides: str) -> list[str]:
    return arguments(directory, corpus, f"doctor.out={directory / 'doctor.json'}", "train.batch_rows=4", *overrides)


def row(report: dict[str, Any], check: str, where: str = "all") -> dict[str, Any]:
    found = [row for row in report["findings"] if row["check"] == check and row["where"] == where]
    assert found, [(row["check"], row["where"]) for row in report["findings"]]
    return found[0]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiling takes ten seconds, and is shown by the slow test."""
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))


@pytest.mark.usefixtures("no_compiler")
def test_a_machine_where_a_run_would_work(tmp_path: Path, corpus: Path) -> None:
    """Caught: an exit code other than 0 for warnings; a layout whose losses differ; files that are left behind."""
    finished = run("doctor", given(tmp_path, corpus), code=0)
    assert finished.stdout.splitlines()[0].startswith("check                verdict  found")
    assert "A run would work here: 0 wrong, " in finished.stdout
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert (report["format"], report["exit_code"], report["verdict"]) == (1, 0, "warning")
    assert row(report, "compiler")["verdict"] == "warning"
    for layout in ("single", "ddp", "fsdp"):
        assert row(report, f"steps, {layout}")["found"].startswith("losses 6."), layout
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_compiler")
def test_five_faults(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a fault that hides another; a secret in the attachment; a traceback."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("MY_PASSWORD", "hunter2hunter2")
    monkeypatch.setenv("https_proxy", "http://user:hunter2hunter2@proxy:1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    faults = [
        "run.root=/proc/runs", "model.vocab_size=100", "logging.wandb.mode=online", "data.path=/no/text.jsonl",
        "data.cache=/proc/cache",
    ]  # fmt: skip
    finished = run("doctor", given(tmp_path, corpus, *faults), code=2)
    assert "Traceback" not in finished.stdout + finished.stderr
    assert "hunter2" not in finished.stdout + (tmp_path / "doctor.json").read_text()
    report = json.loads((tmp_path / "doctor.json").read_text())
    for check in ("run.root", "tokenizer", "data", "data.cache", "variables"):
        assert row(report, check)["verdict"] == "wrong", check
        assert row(report, check)["mend"], check
    assert row(report, "wandb")["verdict"] == "warning"
    assert "A run would not work here" in finished.stdout.splitlines()[-2]


def test_a_mistake_in_the_config_is_said_as_train_says_it(tmp_path: Path, corpus: Path) -> None:
    """Caught: a config of one rank is checked, and not that of torchrun's."""
    for mistake, ranks in (("train.stop_at=99", 1), ("train.batch_rows=5", 2)):
        said = [run(verb, arguments(tmp_path, corpus, mistake), ranks, code=2) for verb in ("train", "doctor")]
        assert said[0].stderr == said[1].stderr != ""


def two_hosts(directory: Path, overrides: Sequence[str], *variables: dict[str, str]) -> tuple[list[int | None], str]:
    """`doctor` on two hosts that are directories: their exit codes, and what both have printed."""
    common, _ = fork_server.rank_variables(2)
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    here = os.getcwd()
    with tempfile.TemporaryFile("w+") as output:
        processes = []
        for number, own in enumerate(variables):
            host = directory / f"host{number}"
            host.mkdir()
            os.chdir(host)
            try:
                setting = common | {"RANK": str(number), "GROUP_RANK": str(number), **own}
                words = ["doctor", *overrides]
                processes.append(fork_server.Forked("ngpt_train", words, setting, output.fileno(), output.fileno()))
            finally:
                os.chdir(here)
        codes = [process.wait(120) for process in processes]
        for process in processes:
            process.end()
        output.seek(0)
        return codes, output.read()


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiler")
def test_two_hosts_that_differ(tmp_path: Path, corpus: Path) -> None:
    """Caught: a directory that each host has for itself; other variables or overrides; a rank that ends with another
    code than rank 0; two ranks that print."""
    overrides = given(tmp_path, corpus, "run.root=runs")
    codes, said = two_hosts(tmp_path, overrides, {}, {"NCCL_P2P_DISABLE": "1"})
    assert codes == [3, 3], said
    assert said.count("A run would not work here") == 1
    report = json.loads((tmp_path / "doctor.json").read_text())
    other = report["ranks"][1]["host"]
    assert other.endswith("(node 1)")
    found = row(report, "run.root", other)
    assert (found["verdict"], found["ranks"]) == ("wrong", [1])
    assert "does not see what rank 0 writes there" in found["found"]
    assert row(report, "variables", other)["verdict"] == "warning"
    assert row(report, "links between hosts")["found"].startswith("all-reduce ")
    assert row(report, "clock", other)["verdict"] == "ok"
    assert row(report, "steps, ddp")["verdict"] == "ok"


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path, corpus: Path) -> None:
    """Caught: what torchrun alone shows: its store, its variables, its exit code; hsdp; a real compilation."""
    overrides = given(tmp_path, corpus, "parallel=fsdp", "train.batch_rows=8")
    for ranks, fault, code in ((4, [], 0), (2, ["model.vocab_size=100"], 1)):
        words = command("doctor", [*overrides, *fault], ranks)
        environment = fork_server.environment()
        finished = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert finished.returncode == code, finished.stdout + finished.stderr
        report = json.loads((tmp_path / "doctor.json").read_text())
        assert report["exit_code"] == (3 if fault else 0)
        assert row(report, "steps, fsdp")["verdict"] == "ok"
        assert row(report, "steps, hsdp")["found"].startswith("losses" if ranks == 4 else "not possible")
        assert row(report, "links within a host")["verdict"] == "ok"
        assert finished.stdout.count("A run would ") == 1


@pytest.mark.slow
def test_a_port_that_is_closed(tmp_path: Path, corpus: Path) -> None:
    """Caught: a hang, or a traceback, where the store of the ranks cannot be reached."""
    variables = fork_server.rank_variables(2)[1] | {"MASTER_ADDR": "127.0.0.1"}
    environment = fork_server.environment() | variables
    words = command("doctor", given(tmp_path, corpus))
    finished = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert finished.returncode == 3
    assert "does not reach the other ranks by way of 127.0.0.1:" in finished.stderr
    assert "Traceback" not in finished.stderr
