"""Judges faults of other machines, from facts that their ranks would have reported."""

from collections.abc import Iterable
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

VERSIONS = {"torch": "2.13.0", "commit": "a" * 40, "code": "123", "NCCL": "2.27", "python": "3.12.1", "config": {}}
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
STEPS = {
    "own": "ddp", "layouts": ["single", "ddp"], "precision": "float32",
    "single": {"losses": [6.2, 6.1, 6.0], "norms": [1.0, 1.1, 1.2]},
    "ddp": {"losses": [6.2, 6.1, 6.0], "norms": [1.0, 1.1, 1.2]},
}  # fmt: skip


def wrong(findings: Iterable[Finding], verdict: str = WRONG) -> list[str]:
    """HOSTS: FOUND of each finding with this verdict; all have a remedy."""
    found = [finding for finding in findings if finding.verdict == verdict]
    assert all(finding.remedy for finding in found)
    return [f"{''.join(place.host for place in finding.where)}: {finding.found}" for finding in found]


@pytest.mark.parametrize(("name", "value"), [("torch", "2.12.0"), ("NCCL", "2.26"), ("code", "456")])
def test_another_version_on_one_host(name: str, value: str) -> None:
    """Caught: hosts that differ and are not named."""
    found = wrong(versions.judge(answers(hosts(3), VERSIONS, VERSIONS | {name: value}, VERSIONS)))
    assert found == [f"b: {name} is {value} here, and {VERSIONS[name]} on a; c"]


def test_another_commit_of_the_same_files() -> None:
    """Caught: a commit that changed only a document stops a run."""
    found = answers(hosts(2), VERSIONS, VERSIONS | {"commit": "b" * 40})
    assert not wrong(versions.judge(found))
    assert wrong(versions.judge(found), WARNING)[0].startswith("b: commit is bbb")


def test_another_config_on_one_host() -> None:
    """Caught: ranks that were started with other overrides."""
    others = [VERSIONS | {"config": {"optim.lr": lr}} for lr in ("0.1", "0.1", "0.2")]
    assert wrong(versions.judge(answers(hosts(3), *others))) == ["c: optim.lr is 0.2 here, and 0.1 on a; b"]


def test_clocks() -> None:
    """Caught: a clock that is ahead is called behind; the delay of the question counts as skew."""
    places = hosts(4)
    clocks = {1: {"ahead": 0.9, "uncertain": 0.01}, 2: {"ahead": -7.0, "uncertain": 0.1}}
    examination = Examination(places, clocks=clocks | {3: {"ahead": 5.0, "uncertain": 4.5}})
    rows = [row for row in judge(config(), examination) if row.check == "clock"]
    assert wrong(rows, WARNING) == ["c: 7.0 s behind rank 0's"]
    examination.clocks = {1: {"ahead": 3600.0, "uncertain": 0.1}}
    assert exit_code(judge(config(), examination)) == 3


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"limits": ENVIRONMENT["limits"] | {"open files": 20}}, WRONG, "at most 20 in a process"),
        ({"limits": ENVIRONMENT["limits"] | {"open files": 1024}}, WARNING, "at most 1024 in a process"),
        ({"limits": ENVIRONMENT["limits"] | {"memlock": 65536}}, WRONG, "65.5 kB, and there is InfiniBand"),
        ({"limits": ENVIRONMENT["limits"] | {"processes": 512}}, WARNING, "at most 512, threads included"),
        ({"tasks": 100}, WARNING, "at most 100, threads included"),
        ({"shm": 67_108_864, "shm_free": 67_000_000}, WRONG, "67.1 MB"),
        ({"shm": 8 * 10**9, "shm_free": 500_000_000}, WARNING, "500 MB of it free"),
        ({"cpus": 1.0}, WARNING, "2 processes share them"),
        ({"variables": {}}, WARNING, "not set, so each process starts 8 threads"),
        ({"variables": {"OMP_NUM_THREADS": "8"}}, WARNING, "8 threads in each of 2 ranks, for 8 CPUs"),
        ({"variables": {"NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "4"}}, WARNING, "NCCL_P2P_DISABLE=1: GPUs of"),
        ({"variables": {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "4"}}, WRONG, "no such network interface"),
    ],
)
def test_limits_and_variables(facts: dict[str, Any], verdict: str, words: str) -> None:
    """Caught: a limit that is compared the wrong way round, or is called well."""
    places = hosts(1, 2)
    assert not [
        row for row in environment.judge(config(), answers(places, ENVIRONMENT), True, None) if row.verdict != OK
    ]
    found = wrong(environment.judge(config(), answers(places, ENVIRONMENT | facts), True, None), verdict)
    assert [row for row in found if words in row], found


def test_a_variable_of_one_host() -> None:
    found = answers(hosts(3), ENVIRONMENT, ENVIRONMENT, ENVIRONMENT | {"variables": {"OMP_NUM_THREADS": "2"}})
    rows = wrong(environment.judge(config(), found, True, None), WARNING)
    assert rows == ["c: OMP_NUM_THREADS is 2 here, and 4 on a; b"]


def test_interfaces() -> None:
    """NCCL takes the beginning of a name, or with `=` the whole of it."""
    there = ["lo", "eth0", "ib0"]
    assert environment.names_interface("eth", there)
    assert environment.names_interface("=ib0,eth9", there)
    assert not environment.names_interface("=eth", there)


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"smi": [{"uuid": "GPU-1", "ecc": "3"}]}, WRONG, "3 uncorrected errors"),
        ({"smi": [{"uuid": "GPU-1", "hot": "Active"}]}, WARNING, "lowered by the heat"),
        ({"smi": [{"uuid": "GPU-1", "PCIe width": "8", "PCIe widest": "16"}]}, WARNING, "PCIe has 8 of 16 lanes"),
        ({"smi_processes": [{"uuid": "GPU-1", "pid": "7", "name": "other"}]}, WARNING, "others compute on it: other"),
        ({"free": 10**10}, WARNING, "that nvidia-smi does not show"),
        ({"arithmetic": "a product of matrices in fp32 is wrong"}, WRONG, "fp32 is wrong"),
        ({"capability": [7, 0]}, WARNING, "computes no bf16"),
        ({"memory": 16 * 10**9, "free": 16 * 10**9}, WARNING, "expects 40 GB of a rank"),
        ({"kernels_refused": "kernels=triton: no"}, WRONG, "kernels=triton: no"),
        ({"device": "cpu", "count": 0, "visible": "", "capability": [8, 0]}, WARNING, "hides 1 of 1 GPUs"),
        ({"device": "cpu", "count": 0, "cuda_build": None}, WARNING, "this torch is built for CPUs"),
    ],
)
def test_devices(facts: dict[str, Any], verdict: str, words: str) -> None:
    place = hosts(1)
    assert not [row for row in devices.judge(config(), answers(place, GPU), 4 * 10**10) if row.verdict != OK]
    found = wrong(devices.judge(config(), answers(place, GPU | facts), 4 * 10**10), verdict)
    assert [row for row in found if words in row], found


def test_a_kernel_that_is_wrong() -> None:
    """Caught: a kernel that is switched off stops a run, or is not named with its host."""
    right = {"off": {}, "slower": {}, "calls": 7, "name": "A100"}
    rows = list(of_each(answers(hosts(2), right, right | {"off": {"rotary": "NaN"}}), devices.judge_kernels))
    assert wrong(rows, WARNING) == ["b: rotary is off: NaN"]
    assert not wrong(rows)
    refused = Answer(hosts(1)[0], {}, "ConfigError: kernels=triton: the kernel rotary must not run")
    assert [row.code for row in devices.judge_kernels(refused)] == [2]


def test_one_host_without_a_gpu() -> None:
    """Caught: a rank that would train on its CPU beside GPUs; two ranks on one GPU."""
    found = answers(hosts(3), GPU, {"device": "cpu", "count": 0}, GPU)
    assert "b: the device type is cpu here, and cuda on a; c" in wrong(devices.judge(config(), found, None))
    assert wrong(devices.judge(config(), answers(hosts(1, 2), GPU), None)) == ["aa: 2 ranks use one GPU"]


def test_a_gpu_that_train_requires() -> None:
    """Caught: an exit code or a message that `train` does not have."""
    refused = Answer(hosts(1)[0], {"smi": [{}], "visible": "", "count": 0}, "ConfigError: train.device=cuda: no GPU")
    rows = [row for row in devices.judge(config("train.device=cuda"), [refused], None) if row.verdict == WRONG]
    assert rows[0].found == "train.device=cuda: no GPU (CUDA_VISIBLE_DEVICES= hides 1 of 1 GPUs)"
    assert rows[0].remedy == "unset CUDA_VISIBLE_DEVICES"
    assert exit_code(rows) == 2


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"shared": {"seen": False, "problem": ""}}, WRONG, "does not see what rank 0 writes there"),
        ({"shared": {"seen": True, "writable": False, "problem": "Read-only file system"}}, WRONG, "Read-only"),
        ({"shared": {"seen": True, "writable": True, "lock": "not seen"}}, WARNING, "a lock of rank 0 is not seen"),
        ({"space": DISKS["space"] | {"free": 2_900}}, WRONG, "checkpoints need 3 kB"),
        ({"space": DISKS["space"] | {"inodes": 10}}, WRONG, "10 files may still be made"),
        ({"shared": DISKS["shared"] | {"ahead": 60.0}}, WARNING, "60.0 s ahead of the clock of the file system"),
        ({"cache_problem": "Read-only file system"}, WRONG, "/cache: cannot be written"),
        ({"compile_cache": "is mounted noexec"}, WARNING, "is mounted noexec"),
        ({"refused": "process 7 on z is training in /runs", "code": 2}, WRONG, "process 7 on z"),
    ],
)
def test_disks(facts: dict[str, Any], verdict: str, words: str) -> None:
    places = hosts(2)
    assert not [row for row in disks.judge(config(), answers(places, DISKS), 1000, "1 kB") if row.verdict != OK]
    found = wrong(disks.judge(config(), answers(places, DISKS, DISKS | facts), 1000, "1 kB"), verdict)
    assert [row for row in found if row.startswith("b: ") and words in row], found


def test_a_slow_disk() -> None:
    """Caught: seconds that are bytes times speed, or are computed from another model's checkpoint."""
    slow = {"speed": {"bytes": 10**8, "write": 10**6, "read": 10**9}}
    rows = list(disks.judge(config(), answers(hosts(1), DISKS | slow), 10**9, "1 GB"))
    assert wrong(rows, WARNING)[0].endswith("1e+03 s for a checkpoint of 1 GB")


def test_other_data_on_one_host() -> None:
    there = {"source ": {"said": "2 files", "identity": "123"}, "tokenizer": {"name": "bytes", "size": 257}}
    other = there | {"source ": {"said": "3 files", "identity": "456"}}
    found = wrong(training_text.judge(config(), answers(hosts(3), there, there, other)))
    assert found == ["c: data: the identity of its files is 456 here, and 123 on a; b"]


def test_a_tokenizer_that_does_not_come() -> None:
    answer = Answer(hosts(1)[0], {"source ": {"said": "", "identity": "1"}, "begun": "the tokenizer"}, "it took longer")
    rows = [row for row in training_text.judge(config(), [answer]) if row.verdict == WRONG]
    assert [(row.check, row.checked) for row in rows] == [("tokenizer", False)]


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"key": False}, WARNING, "there is no key"),
        ({"unreachable": "timed out"}, WARNING, "does not answer (timed out)"),
        ({"accepted": False}, WARNING, "does not accept the key"),
        ({"installed": False}, WARNING, "not installed"),
        ({}, OK, "accepts the key"),
    ],
)
def test_wandb(facts: dict[str, Any], verdict: str, words: str) -> None:
    """Caught: `wrong` for what never stops a run."""
    well = {"installed": True, "server": "https://api.wandb.ai", "key": True, "accepted": True}
    online = config("logging.wandb.mode=online")
    (row,) = wandb_server.judge(online, Answer(hosts(1)[0], well | facts))
    assert words in row.found
    assert row.verdict == verdict


def test_a_compiler_counts_where_it_is_needed() -> None:
    place, missing = hosts(1)[0], {"wrong": "there is no g++, which torch.compile needs", "needed": True}
    assert wrong(compiler.judge(Answer(place, missing))) == [": there is no g++, which torch.compile needs"]
    assert wrong(compiler.judge(Answer(place, missing | {"needed": False})), WARNING)


def test_links() -> None:
    """Caught: a slow link that is called well; the wrong end of a closed port."""
    speeds = {"device": "cuda", "links": {"InfiniBand": 5e10, "Ethernet": 1e9}, "joined": True}
    for speed, verdict in ((1e9, WARNING), (4e10, OK)):
        measured = speeds | {"between": {"all-reduce": speed, "all-gather": speed}}
        row = next(iter(links.judge(answers(hosts(2), measured))))
        assert row.verdict == verdict
        assert "InfiniBand should give 50 GB/s" in row.found
    closed = answers(hosts(2), speeds, speeds | {"unreachable": {"0": "10.0.0.1: timed out"}})
    assert wrong(links.judge(closed)) == ["b: cannot connect to a (10.0.0.1: timed out)"]


def test_ranks_that_do_not_come_together() -> None:
    apart = [Answer(place, {"device": "cpu"}, "it took longer than 20 s") for place in hosts(2)]
    assert wrong(links.judge(apart)) == [
        "ab: could not be checked: the ranks do not come together: it took longer than 20 s"
    ]


def test_unequal_losses() -> None:
    """Caught: a rank that calculates otherwise and is not named; a difference of rounding that stops a run."""
    rounding = {"losses": [6.2 * (1 + 1e-6), 6.1, 6.0], "norms": [1.0, 1.1, 1.2]}
    assert not wrong(trial_steps.judge(answers(hosts(2), STEPS, STEPS | {"ddp": rounding})))
    for part in ("losses", "norms"):
        other = {"ddp": STEPS["ddp"] | {part: [1.001 * x for x in STEPS["ddp"][part]]}}  # type: ignore[dict-item]
        found = wrong(trial_steps.judge(answers(hosts(2), STEPS, STEPS | other)))
        assert len(found) == 1
        assert found[0].startswith(f"b: {part} ")
    assert wrong(
        trial_steps.judge(answers(hosts(2), STEPS, STEPS | {"single": rounding | {"losses": [float("nan")] * 3}}))
    )


def test_a_layout_that_fails() -> None:
    """Caught: the ranks that waited are blamed; a layout that the run does not use stops it."""
    places = hosts(2)
    facts = STEPS | {"layouts": ["single", "ddp", "fsdp"], "begun": "fsdp"}
    failed = [Answer(places[0], facts, "it took longer than 40 s"), Answer(places[1], facts, "RuntimeError: no memory")]
    rows = [row for row in trial_steps.judge(failed) if row.check == "steps, fsdp"]
    assert [(row.verdict, row.where) for row in rows] == [(WARNING, (places[1],))]
    own = [Answer(answer.place, answer.facts | {"own": "fsdp"}, answer.problem) for answer in failed]
    assert wrong(trial_steps.judge(own)) == ["b: could not be checked: RuntimeError: no memory"]


@pytest.mark.parametrize("module", [versions, environment, disks])
def test_a_check_that_hangs_on_one_host(module: Any) -> None:
    """Caught: a row without the host, which would be true of all hosts."""
    names = {versions: "versions", environment: "environment", disks: "disks"}
    hung = Examination(hosts(2), {names[module]: [Answer(hosts(2)[0], {}), Answer(hosts(2)[1], {}, "it took longer")]})
    rows = [row for row in judge(config(), hung) if not row.checked]
    assert [[place.host for place in row.where] for row in rows] == [["b"]]


def test_checked_kernels_have_a_row() -> None:
    """Caught: `right on A100` is lost beside the row about kernels=auto, which is `ok` too."""
    looked = {
        "devices": answers(hosts(2), GPU),
        "kernels": answers(hosts(2), {"off": {}, "slower": {}, "calls": 7, "name": "A100"}),
    }
    rows = [row.found for row in judge(config(), Examination(hosts(2), looked)) if row.check == "kernels"]
    assert rows == ["Triton's (kernels=auto)", "right on A100, in 7 calls of this model"]


def test_a_mistake_of_ours_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a traceback in the place of the table."""
    monkeypatch.setattr(devices, "judge", lambda *_: 1 / 0)
    rows = judge(config(), Examination(hosts(1)))
    found = next(row.found for row in rows if row.check == "devices")
    assert found.startswith("could not be checked: ZeroDivision")
    assert "ranks" in [row.check for row in rows]


def test_absent_ranks() -> None:
    rows = judge(config(), Examination(hosts(2), absent=[2, 3]))
    assert wrong(rows)[0].endswith("no sign of rank 2, 3")
