"""The directories of checkpoints: their names, manifests and checksums. Reads, and writes nothing."""

import hashlib
import re
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json

MANIFEST = "MANIFEST.json"
UNFINISHED = ".unfinished-"
NAME = re.compile(r"step_(\d{8,})")


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    match = NAME.fullmatch(checkpoint.name)
    assert match
    return int(match[1])


def find_checkpoint(key: str, value: str | None) -> Path:
    """The checkpoint that the user's `key=value` names: value is a checkpoint, or a run directory with checkpoints, of
    which the newest is taken.

    Raises DataError if there is none.
    """
    if not value:
        raise DataError(f"{key} is not set: name a run directory or a checkpoint, for example {key}=runs/quickstart")
    path = Path(value).expanduser()
    if (path / MANIFEST).is_file():
        return path
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints:
        what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        raise DataError(f"{key}={value}: {what}. Name a run directory or one of its checkpoints/step_* directories.")
    return checkpoints[-1]


def is_good(checkpoint: Path) -> bool:
    """Whether the loss of a complete checkpoint had not exploded, as its manifest says; those of before do not say."""
    return bool(_manifest(checkpoint).get("good", True))


def losses_of_good(directory: Path) -> list[float]:
    """The losses of the good checkpoints in `directory`, as far as their manifests say them."""
    manifests = [_manifest(path) for path in list_checkpoints(directory) if is_good(path)]
    return [manifest["loss"] for manifest in manifests if isinstance(manifest.get("loss"), float)]


def last_good(directory: Path) -> Path | None:
    """The newest complete checkpoint in `directory` whose loss had not exploded, None if there is none."""
    return next((path for path in reversed(list_checkpoints(directory)) if is_good(path)), None)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """What the manifest says, beside the files; of a damaged one that nothing is good."""
    try:
        manifest = read_json(checkpoint / MANIFEST)
    except DataError:
        return {"good": False}
    return manifest if isinstance(manifest, dict) else {"good": False}


def size_and_sha256(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
