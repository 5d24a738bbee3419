"""The end of `bench gpu`: what was compiled and found is kept, whatever else is still going on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ngpt_train.bench.gpu import protocol
from ngpt_train.bench.gpu.caches import compile_caches, store

ROOT = Path(__file__).parents[3]
# 9 seconds before the end of its budget, one before it is cut off.
HANGS = """
import sys, time, torch
from pathlib import Path
from ngpt_train.bench.gpu import budget, protocol
out = Path(sys.argv[1])
protocol.write_json = lambda *given: time.sleep(600)
running = protocol.Protocol("debug", torch.device("cpu"), 64, out)
running.started -= 55
with budget.ending_in_time(running, out / "caches", out / "caches.tar.gz"):
    running.write()
"""


def test_a_write_that_hangs(tmp_path: Path) -> None:
    """Caught: what cuts off waits for the write that it should cut off: no tables, no caches."""
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 5, ended.stderr
    assert (tmp_path / "caches.tar.gz").exists()
    said, not_written, tables = ended.stdout.partition("bench.json: not written")
    assert "versions: cut off (budget)" in said
    assert not_written
    assert "NOT A GPU" in tables


def test_one_writes_after_the_other(tmp_path: Path) -> None:
    """Caught: two threads that write one file at once, or one that waits and then writes what it saw before."""
    running = protocol.Protocol("debug", torch.device("cpu"), 60, tmp_path)
    with running.writing:
        other = threading.Thread(target=running.write, args=(30,))
        other.start()
        time.sleep(0.2)
        assert not list(tmp_path.iterdir())
        running.found["cut_off"] = ["meanwhile"]
    other.join()
    assert json.loads((tmp_path / "bench.json").read_text())["cut_off"] == ["meanwhile"]
    assert running.writing.acquire(timeout=0), "kept"


def test_a_file_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a compiler that renames its temporary file, between listing and adding, and with it all others lost."""
    directory, archive = tmp_path / "caches", tmp_path / "caches.tar.gz"
    kernels = directory / "triton" / "0"
    kernels.mkdir(parents=True)
    names = [f"{letter}{kind}" for letter in "abc" for kind in ("", ".tmp")]
    for name in names:
        (kernels / name).write_text(name)
    add = tarfile.TarFile.add

    def renamed_first(stored: tarfile.TarFile, path: Any, *given: Any, **options: Any) -> None:
        if str(path).endswith(".tmp"):
            os.rename(path, str(path).removesuffix("tmp"))
        add(stored, path, *given, **options)

    monkeypatch.setattr(tarfile.TarFile, "add", renamed_first)
    store(directory, archive)
    with tarfile.open(archive) as stored:
        assert sorted(stored.getnames()) == [f"triton/0/{letter}" for letter in "abc"]
        stored.extractall(tmp_path / "again", filter="data")
    assert (tmp_path / "again/triton/0/b").read_text() == "b"


def test_a_directory_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a whole benchmark that ends in a traceback because a compiler still writes where it compiles."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def not_empty(path: Any, **_: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        with compile_caches(tmp_path / "caches.tar.gz"):
            pass
    assert (tmp_path / "caches.tar.gz").exists()
