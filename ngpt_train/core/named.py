"""The paths and addresses that this user's trainings on this machine have named: what the user's own runs name is known
by it. One file each, below $XDG_STATE_HOME/ngpt_train/named (~/.local/state); who deletes it forgets."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def note(names: Iterable[str]) -> None:
    """Makes them known. Where that cannot be written, they stay unknown."""
    with contextlib.suppress(OSError):
        for name in names:
            if not is_known(name):
                _file(name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _file(name).write_text(name + "\n")


def is_known(name: str) -> bool:
    return _file(name).is_file()


def _file(name: str) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "ngpt_train" / "named" / hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
