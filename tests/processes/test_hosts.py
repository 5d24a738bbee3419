"""Several hosts: a link that is slow or cut, a host that dies, a head that moves. No step is lost or repeated."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import fork_server
from tests.processes.hosts import Host, hosts, torchrun
from tests.processes.runs import Numbers, arguments, children, end_of, numbers, starts, train, wait_for, wait_for_step

pytestmark = pytest.mark.slow

SECONDS = 6.0  # parallel.hang_seconds
STEPS = 40
PROGRAM = ["tests.processes.faulty", "paced", "train"]
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Job:
    """A run of two hosts in a shared directory."""

    def __init__(self, directory: Path, machines: list[Host], corpus: Path, *options: str) -> None:
        self.directory, self.machines = directory / "runs/test", machines
        self._outputs = {host: directory / f"{host.name}.txt" for host in machines}
        faults = (f"train.steps={STEPS}", "checkpoint.every=5", f"parallel.hang_seconds={SECONDS}")
        self.given = arguments(directory, corpus, *faults, *options)
        self.running: dict[Host, fork_server.Started] = {}

    def start(self, *machines: Host, head: Host | None = None, restarts: int = 0, ranks: int = 1, **new: str) -> None:
        for host in machines or self.machines:
            program = [*PROGRAM, *self.given]
            command = torchrun(head or self.machines[0], program, ranks, restarts, new.get("job", "job"))
            environment = {name: value for name, value in new.items() if name.isupper()}
            self.running[host] = host.start(command, self._outputs[host], **NEW_STORE | environment)

    def wait_for_step(self, step: int) -> None:
        wait_for_step(self.directory, step)

    def wait(self, *machines: Host, seconds: float = 200) -> list[int]:
        deadline = time.monotonic() + seconds
        return [self.running[host].wait(deadline - time.monotonic()) for host in machines or self.machines]

    def output(self, host: Host) -> str:
        return self._outputs[host].read_text()

    def wait_for_output(self, host: Host, pattern: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.output(host))):
            assert time.monotonic() < deadline, f"{host.name}: {self.output(host)[-3000:]}"
            time.sleep(0.1)
        return found[0]

    def starts(self) -> list[dict[str, Any]]:
        return starts(self.directory)

    def end(self) -> dict[str, Any]:
        """exit.json, which a rank writes a moment after it has printed why it ends."""
        wait_for((self.directory / "exit.json").exists, 3 * SECONDS, "no exit.json")
        return end_of(self.directory)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(tmp_path, "alpha", "beta") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Numbers:
    """Losses, norms, rates and tokens of each step of two ranks of one host."""
    directory = tmp_path_factory.mktemp("undisturbed")
    train(arguments(directory, corpus, f"train.steps={STEPS}"), ranks=2)
    return numbers(directory / "runs/test")


def test_a_slow_link_and_a_short_cut(tmp_path: Path, machines: list[Host], corpus: Path, undisturbed: Any) -> None:
    """The run waits, and goes on as if nothing had been."""
    alpha, beta = machines
    job = Job(tmp_path, machines, corpus)
    job.start()
    job.wait_for_step(3)
    for host in machines:
        host.slow(kilobits=8_000)  # 0.2 s for the gradients of a step
    job.wait_for_step(10)
    for host in machines:
        host.slow(None)
    beta.cut()
    time.sleep(SECONDS / 4)  # TCP doubles its waits: it may take as long again until it has sent what was lost
    beta.plug()
    assert job.wait() == [0, 0], job.output(alpha)[-3000:]
    assert numbers(job.directory) == undisturbed
    assert len(job.starts()) == 1
    assert {entry["world_size"] for entry in job.starts()} == {2}


def test_a_long_cut(tmp_path: Path, machines: list[Host], corpus: Path, undisturbed: Any) -> None:
    """Both sides end and say who is missing; when the link is back, torchrun goes on by itself."""
    alpha, beta = machines
    job = Job(tmp_path, machines, corpus)
    job.start(restarts=1)
    job.wait_for_step(7)
    beta.cut()
    job.wait_for_output(alpha, r"hung: rank 1 \(process \d+ on beta, .*\) has given no sign of life", 3 * SECONDS)
    lost = (
        r"hung: the process group's store on alpha has not answered for \d+ s: that host, or the network to it, is gone"
    )
    job.wait_for_output(beta, lost, 3 * SECONDS)
    beta.plug()
    assert job.wait() == [0, 0], job.output(alpha)[-3000:]
    assert numbers(job.directory) == undisturbed
    assert len(job.starts()) == 2


@pytest.mark.parametrize("quietly", [True, False], ids=["power cut", "processes killed"])
def test_a_host_that_dies_and_comes_back(
    tmp_path: Path, machines: list[Host], corpus: Path, undisturbed: Any, quietly: bool
) -> None:
    """The other one names it and waits for it, and the job goes on as soon as it is there again."""
    alpha, beta = machines
    job = Job(tmp_path, machines, corpus)
    job.start(restarts=1)
    job.wait_for_step(7)
    beta.kill(quietly)
    told = r"(hung|error): rank 1 \(process \d+ on beta, .*\) (has given no sign of life|is gone)"
    job.wait_for_output(alpha, told, 3 * SECONDS)
    assert job.end()["code"] == 1
    assert "on beta" in job.end()["reason"]
    beta.plug()
    job.start(beta, restarts=1)
    assert job.wait() == [0, 0], job.output(alpha)[-3000:]
    assert numbers(job.directory) == undisturbed
    assert len(job.starts()) == 2


def test_the_head_moves(tmp_path: Path, machines: list[Host], corpus: Path, undisturbed: Any) -> None:
    """The host of the rendezvous dies. The other one says so, and the same command with another head goes on."""
    alpha, beta = machines
    job = Job(tmp_path, machines, corpus)
    job.start()
    job.wait_for_step(7)
    alpha.kill(quietly=True)
    job.wait_for_output(beta, "hung: the process group's store on alpha has not answered", 3 * SECONDS)
    assert job.end()["host"] == "beta"
    beta.kill(quietly=False)  # its torchrun asks the dead host for a quarter of an hour
    alpha.plug()
    job.start(head=beta)
    assert job.wait() == [0, 0], job.output(beta)[-3000:]
    assert numbers(job.directory) == undisturbed
    assert [entry["step"] for entry in job.starts()] == [0, 5]


def test_a_second_job_of_another_host(tmp_path: Path, machines: list[Host], corpus: Path) -> None:
    alpha, beta = machines
    job = Job(tmp_path, machines, corpus, "train.steps=100000")
    alone = [*PROGRAM, *job.given]
    alpha.start(alone, tmp_path / "alpha.txt")
    job.wait_for_step(3)
    assert beta.start(alone, tmp_path / "beta.txt").wait(100) == 2
    refused = re.search(r"process (\d+) on alpha is training in", job.output(beta))
    assert refused is not None, job.output(beta)
    assert int(refused[1]) in alpha.pids()


def test_hybrid_sharding_and_overwriting_once(tmp_path: Path, machines: list[Host], corpus: Path) -> None:
    """HSDP shards over the ranks of a host. A restart on several hosts overwrites nothing."""
    job = Job(tmp_path, machines, corpus, "parallel=hsdp", "run.overwrite=true")
    train([argument for argument in job.given if "hsdp" not in argument and "overwrite" not in argument])
    of_one = numbers(job.directory)
    job.start(restarts=1, ranks=2)
    job.wait_for_step(1)
    deadline = time.monotonic() + 100
    while not (job.directory / "checkpoints/step_00000010").is_dir() or len(job.starts()) != 1:
        assert time.monotonic() < deadline, job.output(machines[0])[-3000:]
        time.sleep(0.05)
    os.kill(children(job.running[machines[1]])[0], 9)
    assert job.wait() == [0, 0], job.output(machines[0])[-3000:]
    found = numbers(job.directory)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(found[step][0] == pytest.approx(of_one[step][0], abs=1e-4) for step in (1, 2, 3))
    first, second = job.starts()
    assert (first["step"], first["world_size"]) == (0, 4)
    assert second["step"] >= 10
    assert "hsdp" in first["parallel"]


def test_what_torchrun_lacks(tmp_path: Path, machines: list[Host], corpus: Path) -> None:
    """Said before it hurts: no new store for each start, and no name of the job where a run is to be overwritten."""
    job = Job(tmp_path, machines, corpus, "train.steps=2")
    job.start(restarts=1, PAUSE="0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="")
    assert job.wait() == [0, 0]
    assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all hosts" in job.output(machines[0])
    job.given.append("run.overwrite=true")
    job.start(PAUSE="0", job="")
    assert 0 not in job.wait()
    for host in machines:
        assert "it has no name and several hosts. Give torchrun --rdzv-id=NAME" in job.output(host)
    assert sorted(numbers(job.directory)) == [1, 2]
