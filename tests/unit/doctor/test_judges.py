"""Judges faults of other machines, from facts that their ranks would have reported."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ngpt_train.doctor.checks import (
    compiler,
    devices,
    disks,
    environment,
    links,
    training_text,
    trial_steps,
    versions,
    wandb_server,
)
from ngpt_train.doctor.examination import Examination, exit_code, judge
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Answer, Finding, of_each
from tests.unit.doctor.places import answers, config, hosts

VERSIONS = {
    "torch": "2.13.0", "commit": "a" * 40, "code": "123", "NCCL": "2.27", "python": "3.12.1",
    "config": {"optim.lr": "0.1"},
}  # fmt: skip
ENVIRONMENT = {
    "limits": {"open files": 65536, "processes": "unlimited", "memlock": "unlimited"},
    "cpus": 8.0, "memory": 10**11, "tasks": None, "shm": 8 * 10**9, "shm_free": 8 * 10**9,
    "variables": {"OMP_NUM_THREADS": "4"}, "interfaces": ["lo", "eth0"], "infiniband": True,
}  # fmt: skip
GPU = {
    "smi": [{"uuid": "GPU-1", "driver": "580.1", "ecc": "0"}], "count": 1, "cuda_build": "12.8", "device": "cuda:0",
    "name": "A100", "memory": 80 * 10**9, "free": 79 * 10**9, "capability": [8, 0], "gpu": "1", "kernels": None,
    "precision": "bfloat16",
}  # fmt: skip
DISKS = {
    "checkpoint": "", "holder": "", "root": "/runs", "kept": 0, "cache": "/cache", "cache_problem": None,
    "shared": {"seen": True, "writable": True, "lock": "held"}, "compile_cache": None,
    "space": {"free": 10**12, "inodes": 10**6, "directory": "/runs"}, "cache_space": {"free": 10**12},
}  # fmt: skip
LINKS = {
    "device": "cuda", "links": {"InfiniBand": 5e10, "Ethernet": 1e9}, "joined": True,
    "between": {"all-reduce": 4e10, "all-gather": 4e10},
}  # fmt: skip
STEPS = {
    "own": "ddp", "layouts": ["single", "ddp"], "precision": "float32",
    "single": {"losses": [6.2, 6.1, 6.0], "norms": [1.0, 1.1, 1.2]},
    "ddp": {"losses": [6.2 * (1 + 1e-6), 6.1, 6.0], "norms": [1.0, 1.1, 1.2]},  # rounded otherwise
}  # fmt: skip

Fault = tuple[str, dict[str, Any], str, str]  # a check, the facts that differ from a sound machine's, verdict, words
LIMITS = ENVIRONMENT["limits"]
FAULTS: list[Fault] = [
    ("versions", {"torch": "2.12.0"}, WRONG, "torch is 2.12.0 here, and 2.13.0 on a; c"),
    ("versions", {"NCCL": "2.26"}, WRONG, "NCCL is 2.26 here, and 2.27 on a; c"),
    ("versions", {"code": "456"}, WRONG, "code is 456 here"),
    ("versions", {"config": {"optim.lr": "0.2"}}, WRONG, "optim.lr is 0.2 here, and 0.1 on a; c"),
    ("versions", {"commit": "b" * 40}, WARNING, "commit is bbb"),  # of the same files, so that no run is stopped
    ("environment", {"limits": LIMITS | {"open files": 20}}, WRONG, "at most 20 in a process"),
    ("environment", {"limits": LIMITS | {"open files": 1024}}, WARNING, "at most 1024 in a process"),
    ("environment", {"limits": LIMITS | {"memlock": 65536}}, WRONG, "65.5 kB, and there is InfiniBand"),
    ("environment", {"limits": LIMITS | {"processes": 512}}, WARNING, "at most 512, threads included"),
    ("environment", {"tasks": 100}, WARNING, "at most 100, threads included"),
    ("environment", {"shm": 67_108_864, "shm_free": 67_000_000}, WRONG, "67.1 MB"),
    ("environment", {"shm": 8 * 10**9, "shm_free": 500_000_000}, WARNING, "500 MB of it free"),
    ("environment", {"cpus": 1.0}, WARNING, "2 processes share them"),
    ("environment", {"variables": {}}, WARNING, "not set, so each process starts 8 threads"),
    ("environment", {"variables": {"OMP_NUM_THREADS": "8"}}, WARNING, "8 threads in each of 2 ranks, for 8 CPUs"),
    ("environment", {"variables": {"OMP_NUM_THREADS": "2"}}, WARNING, "OMP_NUM_THREADS is 2 here, and 4 on a; c"),
    ("environment", {"variables": {"NCCL_P2P_DISABLE": "1"}}, WARNING, "NCCL_P2P_DISABLE=1: GPUs of"),
    ("environment", {"variables": {"NCCL_SOCKET_IFNAME": "ib0"}}, WRONG, "no such network interface"),
    ("devices", {"smi": [{"uuid": "GPU-1", "ecc": "3"}]}, WRONG, "3 uncorrected errors"),
    ("devices", {"smi": [{"uuid": "GPU-1", "hot": "Active"}]}, WARNING, "lowered by the heat"),
    ("devices", {"smi": [{"uuid": "GPU-1", "PCIe width": "8", "PCIe widest": "16"}]}, WARNING, "PCIe has 8 of 16"),
    ("devices", {"smi_processes": [{"uuid": "GPU-1", "name": "other"}]}, WARNING, "others compute on it: other"),
    ("devices", {"free": 10**10}, WARNING, "that nvidia-smi does not show"),
    ("devices", {"arithmetic": "a product of matrices in fp32 is wrong"}, WRONG, "fp32 is wrong"),
    ("devices", {"capability": [7, 0]}, WARNING, "computes no bf16"),
    ("devices", {"memory": 16 * 10**9, "free": 16 * 10**9}, WARNING, "expects 40 GB of a rank"),
    ("devices", {"kernels_refused": "kernels=triton: no"}, WRONG, "kernels=triton: no"),
    ("devices", {"device": "cpu", "count": 0, "visible": ""}, WARNING, "hides 1 of 1 GPUs"),
    ("devices", {"device": "cpu", "count": 0, "cuda_build": None}, WARNING, "this torch is built for CPUs"),
    ("devices", {"device": "cpu", "count": 0}, WRONG, "the device type is cpu here, and cuda on a; c"),
    ("kernels", {"off": {"rotary": "NaN"}}, WARNING, "rotary is off: NaN"),  # plain PyTorch runs: no run is stopped
    ("disks", {"shared": {"seen": False, "problem": ""}}, WRONG, "does not see what rank 0 writes there"),
    ("disks", {"shared": {"seen": True, "writable": False, "problem": "Read-only"}}, WRONG, "Read-only"),
    ("disks", {"shared": {"seen": True, "writable": True, "lock": "not seen"}}, WARNING, "a lock of rank 0 is not"),
    ("disks", {"space": DISKS["space"] | {"free": 2_900}}, WRONG, "checkpoints need 3 kB"),
    ("disks", {"space": DISKS["space"] | {"inodes": 10}}, WRONG, "10 files may still be made"),
    ("disks", {"shared": DISKS["shared"] | {"ahead": 60.0}}, WARNING, "60.0 s ahead of the clock of the file system"),
    ("disks", {"speed": {"bytes": 9, "write": 8.0, "read": 9.0}}, WARNING, "125 s for a checkpoint of 1 kB"),
    ("disks", {"cache_problem": "Read-only file system"}, WRONG, "/cache: cannot be written"),
    ("disks", {"compile_cache": "is mounted noexec"}, WARNING, "is mounted noexec"),
    ("disks", {"refused": "process 7 on z is training in /runs", "code": 2}, WRONG, "process 7 on z"),
    ("text", {"source ": {"said": "3 files", "identity": "456"}}, WRONG, "its files is 456 here, and 123 on a; c"),
    ("wandb", {"key": False}, WARNING, "there is no key"),  # never `wrong`: a run goes on without wandb
    ("wandb", {"unreachable": "timed out"}, WARNING, "does not answer (timed out)"),
    ("wandb", {"accepted": False}, WARNING, "does not accept the key"),
    ("wandb", {"installed": False}, WARNING, "not installed"),
    ("compiler", {"wrong": "there is no g++", "needed": True}, WRONG, "there is no g++"),
    ("compiler", {"wrong": "there is no g++"}, WARNING, "there is no g++; this run does not compile"),
    ("links", {"unreachable": {"0": "10.0.0.1: timed out"}}, WRONG, "cannot connect to a (10.0.0.1: timed out)"),
    ("steps", {"ddp": STEPS["ddp"] | {"losses": [6.206, 6.1, 6.0]}}, WRONG, "losses 6.206"),
    ("steps", {"ddp": STEPS["ddp"] | {"norms": [1.001, 1.1, 1.2]}}, WRONG, "norms 1.001"),
    ("steps", {"single": STEPS["single"] | {"losses": [float("nan")] * 3}}, WRONG, "losses nan"),
]  # fmt: skip


SOUND: dict[str, dict[str, Any]] = {
    "versions": VERSIONS,
    "environment": ENVIRONMENT,
    "devices": GPU,
    "kernels": {"off": {}, "slower": {}, "calls": 7, "name": "A100"},
    "disks": DISKS,
    "text": {"source ": {"said": "2 files", "identity": "123"}, "tokenizer": {"name": "bytes", "size": 257}},
    "wandb": {"installed": True, "server": "https://api.wandb.ai", "key": True, "accepted": True},
    "compiler": {"path": "/usr/bin/g++", "needed": False, "builds": True},
    "links": LINKS,
    "steps": STEPS,
}


def judged(check: str, found: list[Answer]) -> list[Finding]:
    given = config()
    judges: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": lambda: versions.judge(found),
        "environment": lambda: environment.judge(given, found, True, None),
        "devices": lambda: devices.judge(given, found, 4 * 10**10),
        "kernels": lambda: of_each(found, devices.judge_kernels),
        "disks": lambda: disks.judge(given, found, 1000, "1 kB"),
        "text": lambda: training_text.judge(given, found),
        "wandb": lambda: of_each(found, lambda answer: wandb_server.judge(config("logging.wandb.mode=online"), answer)),
        "compiler": lambda: of_each(found, compiler.judge),
        "links": lambda: links.judge(found),
        "steps": lambda: trial_steps.judge(found),
    }
    return list(judges[check]())


@pytest.mark.parametrize(("check", "facts", "verdict", "words"), FAULTS, ids=[f"{x[0]}: {x[3]}" for x in FAULTS])
def test_a_fault_of_the_second_host(check: str, facts: dict[str, Any], verdict: str, words: str) -> None:
    """Caught: a fault that is called well, too grave, or another host's; a limit that is compared the wrong way round;
    a row without a remedy; a fault where there is none."""
    ranks = 2 if check == "environment" else 1
    sound, faulty = SOUND[check], SOUND[check] | facts
    assert {row.verdict for row in judged(check, answers(hosts(3, ranks), sound))} == {OK}
    found = judged(check, answers(hosts(3, ranks), *[sound] * ranks, *[faulty] * ranks, sound))
    rows = [row for row in found if row.verdict == verdict and words in row.found]
    assert {place.host for row in rows for place in row.where} == {"b"}, found
    assert all(row.remedy for row in rows)
    if verdict == WARNING:
        assert WRONG not in {row.verdict for row in judged(check, answers(hosts(3, ranks), faulty))}


def rows_of(check: str, answer: Answer, verdict: str = WRONG) -> list[Finding]:
    return [row for row in judged(check, [answer]) if row.verdict == verdict]


def test_clocks() -> None:
    """Caught: a clock that is ahead is called behind; the delay of the question counts as skew."""
    clocks = {1: {"ahead": 0.9, "uncertain": 0.01}, 2: {"ahead": -7.0, "uncertain": 0.1}}
    examination = Examination(hosts(4), clocks=clocks | {3: {"ahead": 5.0, "uncertain": 4.5}})
    rows = [row for row in judge(config(), examination) if row.check == "clock" and row.verdict == WARNING]
    assert [(row.where[0].host, row.found) for row in rows] == [("c", "7.0 s behind rank 0's")]
    examination.clocks = {1: {"ahead": 3600.0, "uncertain": 0.1}}
    assert exit_code(judge(config(), examination)) == 3


def test_interfaces() -> None:
    """NCCL takes the beginning of a name, or with `=` the whole of it."""
    there = ["lo", "eth0", "ib0"]
    assert environment.names_interface("eth", there)
    assert environment.names_interface("=ib0,eth9", there)
    assert not environment.names_interface("=eth", there)


def test_what_train_refuses() -> None:
    """Caught: an exit code or a message that `train` does not have; two ranks on one GPU."""
    (place,) = hosts(1)
    facts = {"smi": [{}], "visible": "", "count": 0}
    (row,) = rows_of("devices", Answer(place, facts, "ConfigError: train.device=cuda: no GPU"))
    assert row.found == "train.device=cuda: no GPU (CUDA_VISIBLE_DEVICES= hides 1 of 1 GPUs)"
    assert (row.remedy, exit_code([row])) == ("unset CUDA_VISIBLE_DEVICES", 2)
    (row,) = rows_of("kernels", Answer(place, {}, "ConfigError: kernels=triton: the kernel rotary must not run"))
    assert row.code == 2
    shared = [row for row in judged("devices", answers(hosts(1, 2), GPU)) if row.verdict == WRONG]
    assert [(row.found, len(row.where)) for row in shared] == [("2 ranks use one GPU", 2)]


def test_a_tokenizer_that_does_not_come() -> None:
    answer = Answer(hosts(1)[0], {"source ": {"said": "", "identity": "1"}, "begun": "the tokenizer"}, "it took longer")
    assert [(row.check, row.checked) for row in rows_of("text", answer)] == [("tokenizer", False)]


def test_links_between_all() -> None:
    """Caught: a slow link that is called well, ranks that do not come together."""
    slow = LINKS | {"between": {"all-reduce": 1e9, "all-gather": 1e9}}
    (row,) = judged("links", answers(hosts(2), slow))
    assert row.verdict == WARNING
    assert "InfiniBand should give 50 GB/s" in row.found
    apart = [Answer(place, {"device": "cpu"}, "it took longer than 20 s") for place in hosts(2)]
    (row,) = judged("links", apart)
    assert (row.verdict, row.checked, len(row.where)) == (WRONG, False, 2)
    assert "the ranks do not come together: it took longer than 20 s" in row.found


def test_a_layout_that_fails() -> None:
    """Caught: the ranks that waited are blamed; a layout that the run does not use stops it."""
    places = hosts(2)
    for own, verdict in (("ddp", WARNING), ("fsdp", WRONG)):
        facts = STEPS | {"layouts": ["single", "ddp", "fsdp"], "begun": "fsdp", "own": own}
        problems = ("it took longer than 40 s", "RuntimeError: no memory")
        failed = [Answer(place, facts, problem) for place, problem in zip(places, problems, strict=True)]
        rows = [row for row in judged("steps", failed) if row.check == "steps, fsdp"]
        assert [(row.verdict, row.where) for row in rows] == [(verdict, (places[1],))]
        assert "RuntimeError: no memory" in rows[0].found


@pytest.mark.parametrize("name", ["versions", "environment", "disks"])
def test_a_check_that_hangs_on_one_host(name: str) -> None:
    """Caught: a row without the host, which would be true of all hosts."""
    hung = Examination(hosts(2), {name: [Answer(hosts(2)[0], {}), Answer(hosts(2)[1], {}, "it took longer")]})
    rows = [row for row in judge(config(), hung) if not row.checked]
    assert [[place.host for place in row.where] for row in rows] == [["b"]]


def test_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: `right on A100`, lost beside the row about kernels=auto, which is `ok` too; a rank without a sign of
    life; a mistake of ours, which ends in a traceback in the place of the table."""
    looked = {name: answers(hosts(2), SOUND[name]) for name in ("devices", "kernels")}
    rows = judge(config(), Examination(hosts(2), looked, absent=[2, 3]))
    kernels = [row.found for row in rows if row.check == "kernels"]
    assert kernels == ["Triton's (kernels=auto)", "right on A100, in 7 calls of this model"]
    assert next(row.found for row in rows if row.verdict == WRONG).endswith("no sign of rank 2, 3")
    monkeypatch.setattr(devices, "judge", lambda *_: 1 / 0)
    found = {row.check: row.found for row in judge(config(), Examination(hosts(1)))}
    assert found["devices"].startswith("could not be checked: ZeroDivision")
    assert "ranks" in found
