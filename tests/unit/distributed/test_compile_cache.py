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


@pytest.mark.parametrize(
    ("torchs", "tritons", "ours"),
    [
        (None, None, [INDUCTOR, TRITON]),
        (default_cache_dir(), None, [INDUCTOR, TRITON]),  # torch sets it while it is imported; it is nobody's choice
        ("/chosen", None, []),  # torch puts Triton's files there too
        (None, "/chosen", [INDUCTOR]),
        (default_cache_dir(), "/chosen", [INDUCTOR]),
    ],
)
def test_where_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchs: str | None, tritons: str | None, ours: list[str]
) -> None:
    """Caught: a variable of the user's that is overwritten, or that keeps the other from being set; a directory that
    other machines share, or a relative one, which compiling processes that work elsewhere do not find."""
    given = {name: value for name, value in ((INDUCTOR, torchs), (TRITON, tritons)) if value is not None}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    build(".")
    kept = {name: str(tmp_path / "compiled" / machine() / VARIABLES[name]) for name in ours}
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == given | kept
    assert torch.__version__ in machine()
    assert (tmp_path / "compiled").exists() == bool(ours)
    if torchs == "/chosen":
        assert triton_cache_dir(0) == "/chosen/triton/0"


def test_machines_differ_by_their_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: code compiled for instructions that another CPU lacks; a directory for each clock rate."""
    names = []
    for flags, mhz in (("avx2", 3000), ("avx2", 2999), ("avx2 avx512f", 3000)):
        described = f"processor : 0\nmodel name : CPU\ncpu MHz : {mhz}\nflags : {flags}\n\nprocessor : 1\n"
        monkeypatch.setattr(Path, "read_text", lambda _, described=described: described)
        names.append(machine())
    assert names[0] == names[1] != names[2]


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
