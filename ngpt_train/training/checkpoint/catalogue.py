"""Finds a run's checkpoints (by name, the newest, the best, the last good one), and compares their files with the
manifest. Executes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json
from ngpt_train.core.recorded import COUNT, LIST, NUMBER, POSITIVE, TABLE, Fields, all_checked, checked

if TYPE_CHECKING:
    from ngpt_train.distributed.world import World

MANIFEST = "MANIFEST.json"
VALIDATION = "validation.json"  # beside the checkpoints, because they are written before they are validated
BEST = "best"
UNFINISHED = ".unfinished-"
NAME = re.compile(r"step_(\d{8,})")
# A loss above TIMES_THE_SMALLEST times the smallest loss of the good checkpoints has exploded. The loss of a language
# model that learns does not grow by half; a harder text or a small batch raises it by less.
TIMES_THE_SMALLEST = 1.5
FORMAT = 2
STATE = "state.json"
MOST = 2**63  # torch's counters end below it
SHA256, XXH3 = "sha256", "xxh3"
DIGITS = {XXH3: 32, SHA256: 64}  # length of a checksum; both detect a damaged file, neither a forged one
# state.json; a part of it that an earlier version left out may be missing.
SUM = NUMBER._replace(least=1 - MOST, most=MOST - 1, says="a number below 2^63")
COUNTERS: Fields = {"step": COUNT, "tokens": COUNT, "world_size": POSITIVE, "train_seconds": SUM, "data": TABLE}
GUARDS: Fields = {"skipped_in_a_row": COUNT, "losses": LIST}
PARTS: dict[str, Fields] = {
    "interval": dict.fromkeys(("loss_sum", "n_targets", "n_skipped", ""), SUM),
    "loss_scale": dict.fromkeys(("value", "good_steps", ""), SUM),
    "guards": GUARDS,
}
ROLLBACK: Fields = dict.fromkeys(("number", "step", "bad_step", "first_row", "last_row"), COUNT)
CHUNK = 2**20  # bytes that are written, and summed while they are in the CPU's cache


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
    """The checkpoint for the user's `key=value`: value is a checkpoint, a run directory (its newest checkpoint), or
    `best` in place of a checkpoint's name. Raises DataError if there is none."""
    if not value:
        raise DataError(f"{key} is not set: name a run directory or a checkpoint, for example {key}=runs/NAME")
    path = Path(value).expanduser()
    if (path / MANIFEST).is_file():
        return path
    if path.name == BEST and not path.exists():
        if found := best(path.parent, 1) or best(path.parent / "checkpoints", 1):
            return found[0]
        problem = f"{key}={value}: there is no checkpoint whose validation loss is known"
        raise DataError(f"{problem}. A run keeps the best one with checkpoint.keep_best=1.")
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints:
        what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        if (path / "config.json").is_file():
            what = "is a model of transformers; `import` turns it into a run"
        raise DataError(f"{key}={value}: {what}. Name a run directory or one of its checkpoints/step_* directories.")
    return checkpoints[-1]


def read_validation_losses(directory: Path) -> dict[int, float]:
    """{step: validation loss} of the run of these checkpoints, as far as it is known."""
    path = directory / VALIDATION
    if not path.is_file():
        return {}
    stored = read_json(path)
    if not isinstance(stored, dict) or not all(type(loss) is float for loss in stored.values()):
        raise DataError(f"{path} is damaged: it is not a loss for each step. Delete it.")
    return {int(step): loss for step, loss in stored.items() if re.fullmatch("[0-9]{1,18}", step)}


def best(directory: Path, n: int) -> list[Path]:
    """At most `n` complete checkpoints in `directory`, the lowest validation loss first; equal losses by age."""
    losses = read_validation_losses(directory)
    known = [path for path in list_checkpoints(directory) if step_of(path) in losses]
    return sorted(known, key=lambda path: losses[step_of(path)])[:n]


def losses_of_good(directory: Path) -> list[float]:
    """The losses of the good checkpoints in `directory`, as far as their manifests have them."""
    losses = [manifest.get("loss") for manifest in map(_manifest, list_checkpoints(directory)) if manifest["good"]]
    return [loss for loss in losses if isinstance(loss, float)]


def last_good(directory: Path, every: int = 1) -> Path | None:
    """The newest good checkpoint in `directory` at a multiple of `every` steps; None if there is none. Good: complete,
    and the loss had not exploded."""
    found = (path for path in reversed(list_checkpoints(directory)) if step_of(path) % every == 0)
    return next((path for path in found if _manifest(path)["good"]), None)


def has_exploded(loss: float | None, losses_of_good: Iterable[float]) -> bool:
    """True if the loss of the step before a checkpoint is not finite, or far above the losses of the good checkpoints.
    loss: None, for an unknown loss, counts as sound."""
    if loss is None:
        return False
    return not math.isfinite(loss) or loss > TIMES_THE_SMALLEST * min(losses_of_good, default=math.inf)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest as written. "good" is True where an earlier version left it out, and False if it is damaged."""
    try:
        manifest = read_json(checkpoint / MANIFEST)
    except DataError:
        manifest = None
    return {"good": True} | manifest if isinstance(manifest, dict) else {"good": False}


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file, by its name. Raises DataError for a manifest that is damaged, names a file
    outside the directory, or leaves out state.json or a file of tensors."""
    manifest = read_json(checkpoint / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        problem = "it names no files"
    elif manifest.get("format") != FORMAT:
        problem = f"its format is {manifest.get('format')!r}, this version of ngpt-train reads {FORMAT}"
        raise DataError(f"{checkpoint / MANIFEST}: {problem}. Use the version that wrote it, or another checkpoint.")
    elif outside := [name for name in files if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name]:
        problem = f"it names {outside[0]!r}, which is no file of a checkpoint"
    elif faulty := [name for name, entry in files.items() if not _is_entry(entry)]:
        problem = f"it has no size and checksum of {faulty[0]}"
    elif STATE not in files:
        problem = f"it does not name {STATE}"
    elif unnamed := sorted(name for name in os.listdir(checkpoint) if has_tensors(name) and name not in files):
        problem = f"it does not name {unnamed[0]}"
    else:
        return files
    raise DataError(f"{checkpoint / MANIFEST} is damaged: {problem}. Use another checkpoint.")


def has_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and (kind := checksum_of(entry)) is not None
        and isinstance(entry[kind], str)
        and re.fullmatch(f"[0-9a-f]{{{DIGITS[kind]}}}", entry[kind]) is not None
    )


def differences(checkpoint: Path, files: Mapping[str, dict[str, Any]]) -> list[str]:
    """The differences between the files and their entries in the manifest, a phrase for each."""
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
    """The counters of a checkpoint, its state.json. Raises DataError if they are damaged, or of another step."""
    path = checkpoint / STATE
    where, fix = f"{path} is damaged", "Use another checkpoint."
    progress = checked(read_json(path), COUNTERS, where, ("step", "tokens", "world_size", "data"), fix)
    for part, fields in PARTS.items():
        if part in progress:
            numbers = checked(progress[part], fields, f"{where}: {part}", set(fields) - {"", *GUARDS}, fix)
            checked(numbers, fields, f"{where}: {part}", numbers, fix)  # none is null
    if not all(type(loss) is float for loss in progress.get("guards", {}).get("losses", [])):
        raise DataError(f"{where}: guards has losses that are no numbers. {fix}")
    all_checked(progress.get("rollbacks", []), ROLLBACK, f"{where}: rollbacks", ROLLBACK, fix)
    if NAME.fullmatch(checkpoint.name) and progress["step"] != step_of(checkpoint):
        raise DataError(f"{path} is of step {progress['step']}, its directory of another. Use another checkpoint.")
    return progress


def verify(checkpoint: Path, world: World) -> None:
    """Compares every file with the manifest, and the step with the directory's name. A collective call: each rank reads
    some of the files. Raises DataError, on every rank, with the differences."""
    files = world.on_main(lambda: read_manifest(checkpoint))  # one rank reads it, so that all ranks agree
    mine = {name: entry for index, (name, entry) in enumerate(files.items()) if index % world.size == world.rank}
    own = world.on_all_without_timeout(lambda: differences(checkpoint, mine))  # a slow disk takes long
    found = [problem for part in world.gather(own) for problem in part]
    if found:
        raise DataError(f"The checkpoint {checkpoint} is damaged: {'; '.join(found)}. Use another checkpoint.")
    world.on_main(lambda: read_progress(checkpoint))


def newest_with_config(checkpoints: Sequence[Path]) -> Path | None:
    """The newest checkpoint with sound counters, config and tokenizer; the newest of all if there is none. checkpoints:
    the oldest first. No collective call, and quick: the files of tensors are not read."""
    for checkpoint in reversed(checkpoints):
        with contextlib.suppress(DataError):
            files = read_manifest(checkpoint)
            small = {name: entry for name, entry in files.items() if not has_tensors(name)}
            read_progress(checkpoint)
            if not differences(checkpoint, small):
                return checkpoint
    return checkpoints[-1] if checkpoints else None


def newest_undamaged(checkpoints: Sequence[Path], world: World) -> tuple[Path | None, dict[str, str]]:
    """The newest undamaged checkpoint, None if there are no `checkpoints`; and {name: problem} of the damaged ones
    after it. checkpoints: the oldest first. A collective call. Raises the newest one's DataError if all are damaged."""
    damaged: dict[str, str] = {}
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint, world)
        except DataError as error:
            damaged[checkpoint.name] = str(error)
        else:
            return checkpoint, damaged
    if damaged:
        newest = next(iter(damaged.values()))
        older = f" So are the {len(damaged) - 1} older ones." if len(damaged) > 1 else " There is no older one."
        raise DataError(newest + older)
    return None, damaged


def checksum_of(entry: Mapping[str, Any]) -> str | None:
    """The kind of checksum in a file's entry in the manifest, a value of checkpoint.checksum."""
    return next((kind for kind in DIGITS if kind in entry), None)


def new_checksum(kind: str) -> Any:
    """An object with `update` and `hexdigest`. kind: a value of checkpoint.checksum."""
    if kind == SHA256:
        return hashlib.sha256()
    import xxhash  # here, because models and training import with torch alone

    return xxhash.xxh3_128()


def size_and_checksum(path: Path, kind: str) -> dict[str, Any]:
    """A file's entry in the manifest."""
    with path.open("rb", buffering=0) as file:  # not mapped: cutting the file meanwhile would end in SIGBUS
        checksum = hashlib.file_digest(file, partial(new_checksum, kind))
        return {"bytes": file.tell(), kind: checksum.hexdigest()}
