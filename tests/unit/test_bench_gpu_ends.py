"""The end of `bench gpu`: what was compiled and found is kept, whatever else is still going on."""

from __future__ import annotations

import errno
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.bench.gpu_caches import compile_caches, store


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
