"""Atomic files of core/files.py."""

import os
import stat
import threading
from pathlib import Path

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
