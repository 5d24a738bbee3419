"""Finds a run's checkpoints: by name, the newest, the best and the last good one."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json

MANIFEST = "MANIFEST.json"
VALIDATION = "validation.json"  # beside the checkpoints, because they are written before they are validated
BEST = "best"
UNFINISHED = ".unfinished-"
NAME = re.compile(r"step_(\d{8,})")
# A loss above TIMES_THE_SMALLEST times the smallest loss of the good checkpoints has exploded. The loss of a language
# model that learns does not grow by half; a harder text or a small batch raises it by less.
TIMES_THE_SMALLEST = 1.5


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
    `best` in place of a checkpoint's name.

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
            what = "is a model of transformers; `import` turns it into a run"
        raise DataError(f"{key}={value}: {what}. Name a run directory or one of its checkpoints/step_* directories.")
    return checkpoints[-1]


def candidates(directory: Path, step: int | None) -> list[Path]:
    """The complete checkpoints in `directory`, oldest first; with `step`, the checkpoint of this step alone. Raises
    DataError if it is not there."""
    found = {step_of(path): path for path in list_checkpoints(directory)}
    if step is None or step in found:
        return list(found.values()) if step is None else [found[step]]
    raise DataError(
        f"run.resume_step={step}: there is no complete checkpoint of this step in {directory} (there are: "
        f"{', '.join(map(str, found)) or 'none'}). Name one of them, or leave it out."
    )


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
    """At most `n` complete checkpoints in `directory`, by validation loss, the lowest first; equal losses by age, the
    oldest first."""
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
