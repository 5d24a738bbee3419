"""Plants faults on this machine; each gets a row with its remedy."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ngpt_train.config.schema import Config
from ngpt_train.distributed.first_contact import Contact
from ngpt_train.distributed.world import World
from ngpt_train.doctor.checks import compiler, devices, disks, environment, links, training_text, versions, wandb_server
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Answer, Finding, Place
from tests.hub_server import Hub, serving, status
from tests.processes.runs import write_corpus, write_parquet_shards
from tests.unit.doctor.places import config

HERE = Place(host="here")


def facts_of(look: Callable[[Callable[..., None]], None]) -> Answer:
    """Runs a look in this process, for monkeypatch."""
    facts: dict[str, Any] = {}
    problem = None
    try:
        look(lambda **found: facts.update(found))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Answer(HERE, facts, problem)


def on_disks(*overrides: str) -> list[Finding]:
    given = config(*overrides)
    answer = facts_of(lambda report: disks.look(given, HERE, "token", 3 * 10**6, report))
    return list(disks.judge(given, [answer], 3 * 10**6, "3 MB"))


def in_text(*overrides: str) -> list[Finding]:
    given = config(*overrides)
    return list(training_text.judge(given, [facts_of(lambda report: training_text.look(given, report))]))


def row(findings: list[Finding], check: str) -> Finding:
    found = [finding for finding in findings if finding.check == check]
    graver = [finding for finding in found if finding.verdict != OK]
    assert all(finding.remedy for finding in graver), "no mending"
    return (graver or found)[0]


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    return [f"run.root={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"]


def test_a_machine_without_a_fault(tmp_path: Path, places: list[str]) -> None:
    """Caught: a warning where all is well; files that the doctor leaves behind."""
    found = on_disks(*places)
    assert [finding for finding in found if finding.verdict != OK] == []
    assert {finding.check for finding in found} >= {
        "run",
        "run.root",
        "locks",
        "free space",
        "disk speed",
        "data.cache",
    }
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.rglob(".ngpt-train-doctor*"))
    corpus = write_corpus(tmp_path / "text.jsonl")
    assert [x.verdict for x in in_text("data=local", f"data.path={corpus}", *places)] == [OK, OK]
    found = list(versions.judge([facts_of(lambda report: versions.look(config(), report))]))
    assert not [finding for finding in found if finding.verdict == WRONG]
    found = list(devices.judge(config(), [facts_of(lambda report: devices.look(config(), 0, report))], None))
    assert not [finding for finding in found if finding.verdict != OK]
    found = list(environment.judge(config(), [facts_of(environment.look)], False, 10**6))
    assert not [finding for finding in found if finding.verdict == WRONG]


class Statvfs(NamedTuple):
    f_frsize: int = 4096
    f_bavail: int = 1000
    f_blocks: int = 10**6
    f_files: int = 10**6
    f_favail: int = 10**6
    f_flag: int = 0


@pytest.mark.parametrize(("fault", "words"), [({}, "checkpoints need 9 MB (3 of 3 MB)"), ({"f_favail": 9}, "9 files")])
def test_no_space(monkeypatch: pytest.MonkeyPatch, places: list[str], fault: dict[str, int], words: str) -> None:
    room = {} if not fault else {"f_bavail": 10**6}
    monkeypatch.setattr(os, "statvfs", lambda _: Statvfs(**room, **fault))
    found = row(on_disks(*places), "free space")
    assert found.verdict == WRONG
    assert words in found.found


def test_a_run_that_is_under_way(tmp_path: Path, places: list[str]) -> None:
    """Caught: a held lock is not seen; the lock file of a dead process stops a run."""
    directory = tmp_path / "runs/test"
    directory.mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        (directory / name).write_text("")
    with (directory / "lock").open("w") as lock:
        lock.write("process 7 on z")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = row(on_disks(*places, "run.name=test"), "run")
        assert (found.verdict, found.code) == (WRONG, 2)
        assert "process 7 on z is training in" in found.found
    for name in ("config.yaml", "run.json"):
        (directory / name).unlink()
    found = row(on_disks(*places, "run.name=test"), "run")
    assert found.verdict == OK
    assert "its lock file names process 7 on z, but nobody holds the lock" in found.found


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, places: list[str]) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "no locks (Function not implemented)" in row(on_disks(*places), "locks").found


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tokenizer.kind=sentencepiece", "tokenizer.path=/no/such.model"], "/no/such.model: cannot be read"),
        (["model.vocab_size=100"], "model.vocab_size=100: with bytes there are 257 ids"),
    ],
)
def test_a_tokenizer_that_does_not_fit(tmp_path: Path, places: list[str], overrides: list[str], words: str) -> None:
    corpus = write_corpus(tmp_path / "text.jsonl")
    kind = ["tokenizer=sentencepiece", *overrides[1:]] if "kind" in overrides[0] else overrides
    found = row(in_text("data=local", f"data.path={corpus}", *places, *kind), "tokenizer")
    assert (found.verdict, found.code) == (WRONG, 3)
    assert words in found.found


def test_text_that_cannot_be_read(tmp_path: Path, places: list[str]) -> None:
    """Caught: only the first file is looked at."""
    directory = tmp_path / "text"
    directory.mkdir()
    write_corpus(directory / "a.jsonl")
    (directory / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    found = row(in_text("data=local", f"data.path={directory}", *places), "data")
    assert (found.verdict, found.code, found.checked) == (WRONG, 3, True)
    assert "b.jsonl: cannot be read" in found.found


def test_prepared_tokens_that_are_damaged(tmp_path: Path, places: list[str]) -> None:
    """Caught: a flipped byte is not found; a sound directory is called damaged."""
    from ngpt_train.data import prepare_dataset

    corpus, prepared = write_corpus(tmp_path / "text.jsonl"), tmp_path / "prepared"
    prepare_dataset(config("data=local", f"data.path={corpus}", "data.val_fraction=0.2", *places), prepared)
    given = ["data=tokens", f"data.path={prepared}", *places]
    assert row(in_text(*given), "data").verdict == OK
    index = next(prepared.glob("train*.idx*"), None) or next(x for x in prepared.iterdir() if "train" in x.name)
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 1
    index.write_bytes(content)
    found = row(in_text(*given), "data")
    assert (found.verdict, found.code) == (WRONG, 3)
    assert index.name in found.found


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    shards = write_parquet_shards(tmp_path / "shards", [20, 20])
    with serving(Hub("someone/text", {f"data/{x.name}": x.read_bytes() for x in shards.iterdir()})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        yield served


def test_the_hub(hub: Hub, places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: lists that can be had while files cannot; a server that does not answer."""
    given = ["data=hf", f"data.repo={hub.repo}", *places]
    assert "2 files on the hub, the first one can be read" in row(in_text(*given), "data").found
    hub.faults += [status(403)] * 20
    assert row(in_text(*given), "data").verdict == WRONG
    hub.faults.clear()
    monkeypatch.setattr(training_text, "HUB_SECONDS", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        found = row(in_text(*given), "data")
    assert found.verdict == WRONG
    assert "no connection to http://127.0.0.1" in found.found
    assert "data.fetch_minutes" not in found.found, "the limit is the doctor's"


def test_wandb_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Caught: a server that does not answer holds the doctor up; a key of ~/.netrc is not found."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "netrc").write_text("machine 127.0.0.1\n  login user\n  password 0123456789\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    given = config("logging.wandb.mode=online")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(wandb_server, "SECONDS", 0.2)
        found = list(wandb_server.judge(given, facts_of(lambda report: wandb_server.look(given, report))))
    assert found[0].verdict == WARNING
    assert "does not answer (timed out)" in found[0].found
    assert "0123456789" not in found[0].found


@pytest.mark.parametrize("compiled", ["true", "auto"])
def test_a_broken_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: str) -> None:
    """Caught: a compiler that is there and does not work; a run that does not compile is stopped."""
    given = config(f"train.compile={compiled}", "train.device=cpu")
    for cxx in ("/bin/false", str(tmp_path / "g++")):
        monkeypatch.setenv("CXX", cxx)
        answer = facts_of(lambda report: compiler.look(given, 0, report))
        found = next(compiler.judge(answer))
        assert found.verdict == (WRONG if compiled == "true" else WARNING)
        assert cxx in found.found


@pytest.mark.skipif(not os.access("/usr/bin/c++", os.X_OK), reason="no C++ compiler")
def test_a_compiler_that_works(tmp_path: Path) -> None:
    assert compiler.compiler_is_broken("c++", str(tmp_path)) is None


def test_a_gpu_that_is_hidden() -> None:
    """Caught: `train.device=cuda` without a GPU is not refused as `train` refuses it."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    given = config("train.device=cuda")
    answer = facts_of(lambda report: devices.look(given, 0, report))
    found = next(x for x in devices.judge(given, [answer], None) if x.verdict == WRONG)
    assert found.code == 2
    assert found.found.startswith("train.device=cuda: this process is number 0")


def test_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a field that a driver does not know takes the others with it."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        '#!/bin/sh\ncase "$1" in *,*) exit 2;; *=uuid) echo GPU-1; echo GPU-2;; *volatile*) exit 2;; esac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert devices.smi({"uuid": "uuid", "ecc": "ecc.errors.uncorrected.volatile.total"}) == [
        {"uuid": "GPU-1"},
        {"uuid": "GPU-2"},
    ]


def test_kernels_are_checked_as_train_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: other shapes than the run's are checked; a broken kernel is not told."""
    asked = []

    def contact(given: Config, world: World, micro_rows: int) -> Contact:
        asked.append((given.model.vocab_size, given.model.d_model, world.size, micro_rows))
        return Contact("GPU", "measured", off={"swiglu": "its result is NaN"})

    monkeypatch.setattr(devices, "first_contact", contact)
    given = config("train.batch_rows=64")  # 16 of each rank
    answer = facts_of(lambda report: devices.look_at_kernels(given, Place(size=4), 257, report))
    assert asked == [(257, given.model.d_model, 1, 16)]
    assert next(devices.judge_kernels(answer)).found == "swiglu is off: its result is NaN"
    given = config()
    assert facts_of(lambda report: devices.look_at_kernels(given, HERE, 257, report)).problem is None


def test_speeds_of_networks(tmp_path: Path) -> None:
    """Caught: bits for bytes; a port that is down counts."""
    for port, state in (("0", "4: ACTIVE"), ("1", "1: DOWN")):
        directory = tmp_path / f"class/infiniband/mlx5_{port}/ports/1"
        directory.mkdir(parents=True)
        (directory / "state").write_text(state)
        (directory / "rate").write_text("400 Gb/sec (4X NDR)")
    for name, speed in (("eth0", "100000"), ("eth1", "-1")):
        directory = tmp_path / f"class/net/{name}"
        directory.mkdir(parents=True)
        (directory / "operstate").write_text("up")
        (directory / "speed").write_text(speed)
    assert links.infiniband(tmp_path) == 50e9
    assert links.ethernet(tmp_path) == 12.5e9
    assert links.infiniband(tmp_path / "nothing") is None
    assert links.ethernet(tmp_path / "nothing") is None
