"""Atomic files of core/files.py."""

import errno
import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from ngpt_train.core.files import write_json


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    """plan.out=/dev/stdout: as root, a rename would put a file in the place of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, {"a": 1})
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    reader.join(timeout=10)
    assert read == ['{\n  "a": 1\n}\n']


def test_what_cannot_be_written_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    """Caught: the file of an unfinished write, which takes room on a full disk; an error that does not say of which
    file, because the file's end tries to write again."""
    path = tmp_path / "a.json"
    write_json(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))  # as a full disk, but for its number
    try:
        with pytest.raises(OSError, match=r"a\.json") as raised:
            write_json(path, "longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert os.listdir(tmp_path) == ["a.json"]
    assert path.read_text() == '"old"\n'
