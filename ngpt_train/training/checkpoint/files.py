"""The directories of checkpoints: their names, manifests and checksums. Reads, and writes nothing."""

import hashlib
import os
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json

MANIFEST = "MANIFEST.json"
FORMAT = 2  # tensors in safetensors; 1: in torch's own files, whose index is a pickle
MOST = 2**63  # of what torch counts
STATE = "state.json"
VALIDATION = "validation.json"  # beside the checkpoints, because they are written before they are validated
BEST = "best"
UNFINISHED = ".unfinished-"
NAME = re.compile(r"step_(\d{8,})")
SHA256, XXH3 = "sha256", "xxh3"
DIGITS = {XXH3: 32, SHA256: 64}  # of a checksum; both tell a damaged file, neither a forged one
# The numbers that parts of state.json have at least; those of before lack a part.
_NUMBERS = {"interval": {"loss_sum", "n_targets", "n_skipped"}, "loss_scale": {"value", "good_steps"}}
CHUNK = 2**20  # bytes that are read, or written, and summed at a time, so that they are still in the CPU's cache


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
    which the newest is taken, or `best` in place of a checkpoint's name.

    Raises DataError if there is none.
    """
    if not value:
        raise DataError(f"{key} is not set: name a run directory or a checkpoint, for example {key}=runs/NAME")
    path = Path(value).expanduser()
    if (path / MANIFEST).is_file():
        return path
    if path.name == BEST and not path.exists():
        if found := best(path.parent, 1) or best(path.parent / "checkpoints", 1):
            return found[0]
        raise DataError(
            f"{key}={value}: there is no checkpoint whose validation loss is known. A run keeps the best one with "
            "checkpoint.keep_best=1."
        )
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints:
        what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        if (path / "config.json").is_file():
            what = "is a model of transformers, of which `import` makes a run"
        raise DataError(f"{key}={value}: {what}. Name a run directory or one of its checkpoints/step_* directories.")
    return checkpoints[-1]


def candidates(directory: Path, step: int | None) -> list[Path]:
    """The complete checkpoints in `directory` from which a run may go on, oldest first; the one of `step` if that is
    not None. Raises DataError if that one is not there."""
    found = {step_of(path): path for path in list_checkpoints(directory)}
    if step is None or step in found:
        return list(found.values()) if step is None else [found[step]]
    raise DataError(
        f"run.resume_step={step}: there is no complete checkpoint of this step in {directory} (there are: "
        f"{', '.join(map(str, found)) or 'none'}). Name one of them, or leave it out."
    )


def read_validation_losses(directory: Path) -> dict[int, float]:
    """The validation loss of each step at which the run of these checkpoints was validated, as far as it is known."""
    path = directory / VALIDATION
    if not path.is_file():
        return {}
    stored = read_json(path)
    if not isinstance(stored, dict) or not all(type(loss) is float for loss in stored.values()):
        raise DataError(f"{path} is damaged: it is not a loss for each step. Delete it.")
    return {int(step): loss for step, loss in stored.items() if step.isdigit()}


def best(directory: Path, n: int) -> list[Path]:
    """The `n` complete checkpoints in `directory` with the lowest validation loss, the lowest first; of equal ones the
    older first. There may be fewer."""
    losses = read_validation_losses(directory)
    known = [path for path in list_checkpoints(directory) if step_of(path) in losses]
    return sorted(known, key=lambda path: losses[step_of(path)])[:n]


def is_good(checkpoint: Path) -> bool:
    """Whether the loss of a complete checkpoint had not exploded, as its manifest says; those of before do not say."""
    return bool(_manifest(checkpoint).get("good", True))


def losses_of_good(directory: Path) -> list[float]:
    """The losses of the good checkpoints in `directory`, as far as their manifests say them."""
    manifests = [_manifest(path) for path in list_checkpoints(directory) if is_good(path)]
    return [manifest["loss"] for manifest in manifests if isinstance(manifest.get("loss"), float)]


def last_good(directory: Path, every: int = 1) -> Path | None:
    """The newest complete checkpoint in `directory` whose loss had not exploded, of those at multiples of `every`; None
    if there is none."""
    found = (path for path in reversed(list_checkpoints(directory)) if step_of(path) % every == 0)
    return next((path for path in found if is_good(path)), None)


@dataclass(frozen=True)
class Manifest:
    """files: size and checksum of every file by its name."""

    format: int
    files: dict[str, dict[str, Any]]


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest. Raises DataError where it is damaged, names a file outside of the directory, lacks one that every
    checkpoint has, or leaves out a file of tensors."""
    manifest = read_json(checkpoint / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        problem = "it names no files"
    elif manifest.get("format") not in (1, FORMAT):
        problem = f"its format is {manifest.get('format')!r}, this version of ngpt-train reads 1 and {FORMAT}"
    elif outside := [name for name in files if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name]:
        problem = f"it names {outside[0]!r}, which is no file of a checkpoint"
    elif faulty := [name for name, entry in files.items() if not _is_entry(entry)]:
        problem = f"it has no size and checksum of {faulty[0]}"
    elif STATE not in files:
        problem = f"it does not name {STATE}"
    elif unnamed := sorted(name for name in os.listdir(checkpoint) if has_tensors(name) and name not in files):
        problem = f"it does not name {unnamed[0]}"
    else:
        return Manifest(manifest["format"], files)
    raise DataError(f"{checkpoint / MANIFEST} is damaged: {problem}. Use another checkpoint.")


def has_tensors(name: str) -> bool:
    """Whether a file of a checkpoint has tensors, or says where they are."""
    return name.endswith((".safetensors", ".distcp")) or name == ".metadata"


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and (kind := checksum_of(entry)) is not None
        and isinstance(entry[kind], str)
        and re.fullmatch(f"[0-9a-f]{{{DIGITS[kind]}}}", entry[kind]) is not None
    )


def differences(checkpoint: Path, files: Mapping[str, dict[str, Any]]) -> list[str]:
    """How the files differ from their entries of the manifest, in words."""
    problems = []
    for name, expected in files.items():
        path = checkpoint / name
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        elif size_and_checksum(path, kind := checksum_of(expected) or SHA256)[kind] != expected[kind]:
            problems.append(f"{name} has another {kind} than when it was written")
    return problems


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The counters of a checkpoint, its state.json. Raises DataError where they are damaged, or of another step than
    the name of the directory says."""
    path = checkpoint / STATE
    progress = read_json(path)
    if not isinstance(progress, dict):
        raise DataError(f"{path} is damaged: it is no object. Use another checkpoint.")
    for name, smallest in (("step", 0), ("tokens", 0), ("world_size", 1)):
        if type(value := progress.get(name)) is not int or not smallest <= value < MOST:
            raise DataError(f"{path} is damaged: {name} is {value!r}. Use another checkpoint.")
    seconds = progress.get("train_seconds")  # None in those of before
    sums = all(_are_numbers(progress[part], names) for part, names in _NUMBERS.items() if part in progress)
    if not sums or not (seconds is None or _are_numbers({"seconds": seconds}, {"seconds"})):
        raise DataError(f"{path} is damaged: its sums and seconds are no such numbers. Use another checkpoint.")
    if not isinstance(progress.get("data"), dict):
        raise DataError(f"{path} is damaged: it has no position in the data. Use another checkpoint.")
    if not _are_guards(progress.get("guards", {})):
        raise DataError(f"{path} is damaged: guards has no losses. Use another checkpoint.")
    if not _are_rollbacks(progress.get("rollbacks", [])):
        raise DataError(f"{path} is damaged: rollbacks lists none. Use another checkpoint.")
    if NAME.fullmatch(checkpoint.name) and progress["step"] != step_of(checkpoint):
        raise DataError(f"{path} is of step {progress['step']}, its directory of another. Use another checkpoint.")
    return progress


def _are_numbers(stored: Any, names: Set[str]) -> bool:
    """Whether it has these numbers, and all are finite."""
    if not isinstance(stored, dict) or not names <= stored.keys():
        return False
    return all(type(number) in (int, float) and abs(number) < MOST for number in stored.values())


def _are_guards(stored: Any) -> bool:
    return (
        isinstance(stored, dict)
        and type(skipped := stored.get("skipped_in_a_row", 0)) is int
        and 0 <= skipped < MOST
        and isinstance(losses := stored.get("losses", []), list)
        and all(type(loss) is float for loss in losses)
    )


def _are_rollbacks(stored: Any) -> bool:
    counted = ("number", "step", "bad_step", "first_row", "last_row")
    return isinstance(stored, list) and all(
        isinstance(rollback, dict) and all(type(rollback.get(name)) is int for name in counted) for rollback in stored
    )


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """What the manifest says, beside the files; of a damaged one that nothing is good."""
    try:
        manifest = read_json(checkpoint / MANIFEST)
    except DataError:
        return {"good": False}
    return manifest if isinstance(manifest, dict) else {"good": False}


def checksum_of(entry: Mapping[str, Any]) -> str | None:
    """The kind of checksum that a file's entry in the manifest has, a value of checkpoint.checksum."""
    return next((kind for kind in DIGITS if kind in entry), None)


def new_checksum(kind: str) -> Any:
    """An object with `update` and `hexdigest`. kind: a value of checkpoint.checksum."""
    if kind == SHA256:
        return hashlib.sha256()
    import xxhash  # here, because models and training import with torch alone

    return xxhash.xxh3_128()


def size_and_checksum(path: Path, kind: str) -> dict[str, Any]:
    """A file's entry in the manifest."""
    checksum = new_checksum(kind)
    buffer = memoryview(bytearray(CHUNK))
    size = 0
    with path.open("rb", buffering=0) as file:  # not mapped: a file that is cut meanwhile must not end in SIGBUS
        while n := file.readinto(buffer):
            checksum.update(buffer[:n])
            size += n
    return {"bytes": size, kind: checksum.hexdigest()}


def gb(n_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.2f} MB"
