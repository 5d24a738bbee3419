"""What torch.compile has compiled outlives the process, and never keeps one from training."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir, triton_cache_dir

from ngpt_train.config import load_config
from ngpt_train.core import log
from ngpt_train.distributed.compilation import INDUCTOR, TRITON, VARIABLES, machine
from ngpt_train.distributed.layouts import parallelize
from ngpt_train.distributed.world import World


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process whose user has set nothing; nothing is really compiled."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "put back afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)


def build(cache: Path | str, compiled: bool = True) -> None:
    options = ["model=ngpt", "scale=debug", "model.vocab_size=97", "train.device=cpu", f"data.cache={cache}"]
    config = load_config([*options, f"train.compile={str(compiled).lower()}"])
    parallelize(config, World(0, 1, 0, torch.device("cpu")), micro_rows=1)


@pytest.mark.parametrize("relative", [False, True])
def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool) -> None:
    """Caught: a directory that other machines share, a relative one, which compiling processes that work elsewhere do
    not find."""
    monkeypatch.chdir(tmp_path)
    build("." if relative else tmp_path)
    assert [os.environ[name] for name in VARIABLES] == [
        str(tmp_path / "compiled" / machine() / part) for part in ("inductor", "triton")
    ]
    assert torch.__version__ in machine()


def test_machines_differ_by_their_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: code compiled for instructions that another CPU lacks; a directory for each clock rate."""
    names = []
    for flags, mhz in (("avx2", 3000), ("avx2", 2999), ("avx2 avx512f", 3000)):
        described = f"processor : 0\nmodel name : CPU\ncpu MHz : {mhz}\nflags : {flags}\n\nprocessor : 1\n"
        monkeypatch.setattr(Path, "read_text", lambda _, described=described: described)
        names.append(machine())
    assert names[0] == names[1] != names[2]


def test_torchs_default_is_nobodys_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: what torch itself sets while it is imported, taken for the user's."""
    monkeypatch.setenv(INDUCTOR, default_cache_dir())
    build(tmp_path)
    assert os.environ[INDUCTOR].startswith(str(tmp_path))


def test_torchs_directory_is_tritons_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: Triton's files in data.cache, which the user left by naming another place for torch's; torch would put
    them there too."""
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "chosen"))
    build(tmp_path / "cache")
    assert os.environ[INDUCTOR] == str(tmp_path / "chosen")
    assert TRITON not in os.environ
    assert triton_cache_dir(0) == str(tmp_path / "chosen/triton/0")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("torchs", [None, default_cache_dir()])
def test_the_choice_for_triton_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchs: str | None) -> None:
    """Caught: a variable of the user's that is overwritten, or one that keeps the other from being set."""
    monkeypatch.setenv(TRITON, "/chosen")
    if torchs is not None:
        monkeypatch.setenv(INDUCTOR, torchs)
    build(tmp_path)
    assert os.environ[TRITON] == "/chosen"
    assert os.environ[INDUCTOR].startswith(str(tmp_path))


def test_nothing_compiled_nothing_kept(tmp_path: Path) -> None:
    """Caught: directories, and a changed environment, of runs that compile nothing."""
    build(tmp_path / "cache", compiled=False)
    assert not (tmp_path / "cache").exists()
    assert not any(name in os.environ for name in VARIABLES)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def no_room(**_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "replacement", "says"),
    [
        (tempfile, "TemporaryFile", no_room, "No space left on device"),
        (fcntl, "flock", no_locks, "Function not implemented"),
        (os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC), "noexec"),
        (shutil, "disk_usage", lambda _: SimpleNamespace(free=10**8), "less than 1 GB"),
        (None, "", None, "Not a directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_directory_that_does_not_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: object,
    name: str,
    replacement: Callable[..., object] | None,
    says: str,
) -> None:
    """Caught: a run that a full or read-only cache ends, and a log that repeats it for every model."""
    if module is not None:
        monkeypatch.setattr(module, name, replacement)
    for _ in range(2):
        build(tmp_path if module else "/dev/null/cache")
    assert not any(name in os.environ for name in VARIABLES)
    (record,) = (record for record in caplog.records if "torch.compile" in record.message)
    assert says in record.message
    assert record.levelname == "WARNING"
