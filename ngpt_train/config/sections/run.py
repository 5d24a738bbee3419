"""The keys run.* and scale.*: where a run lives, how it starts and when it ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from ngpt_train.config.keys import AUTO, COUNT, SEED, Conflict, key

# One level of directories: multirun numbers its jobs <name>/<k>.
_PART = "[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"  # file systems take 255 bytes
_NAME = re.compile(f"{_PART}(/{_PART})?")


@dataclass
class RunConfig:
    """Identity of a run: where it lives, how it starts and when it ends."""

    name: str = key(
        AUTO,
        "Directory name below run.root; auto is <model>-<scale>-seed<seed>, for a row of an experiment table "
        "<table>-<row>-<scale>-seed<seed>.",
    )
    root: str = key("runs", "Directory that holds all run directories.")
    resume: str = key(
        AUTO,
        "auto continues the newest checkpoint if there is one, must fails without one, never refuses a used directory.",
        choices=(AUTO, "must", "never"),
    )
    resume_step: Union[int, None] = key(
        None,
        "Step of the checkpoint from which the run goes on: this one or none. Those after it are put aside. It counts "
        "once for a job, not for its restarts.",
        **COUNT,
    )
    allow_change: Union[list[str], None] = key(
        None,
        "Keys of optim, schedule, train and guards, such as [optim.lr], whose new values a resumed run takes although "
        "they alter its mathematics; run.json keeps what was changed.",
    )
    overwrite: bool = key(False, "Delete what the run directory holds and start anew.")
    seed: int = key(0, "Seed of the weights and of the order of the data.", **SEED)
    init_from: Union[str, None] = key(None, "Checkpoint whose weights (nothing else) the run starts from.")
    max_time: Union[float, None] = key(
        None, "Hours after which the run saves and stops cleanly; null is no limit.", above=0, maximum=1_000_000
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that exclude each other. `name` is resolved."""
        if not _NAME.fullmatch(self.name):
            fix = "Letters, digits, '.', '_' and '-', at most one '/', parts of 200 at most, none with '.' or '-' first"
            yield "run.name", "not a directory name", fix
        if self.resume_step is not None and (self.overwrite or self.resume == "never"):
            problem = "the run is to go on, and to be deleted or refused"
            yield "run.resume_step run.overwrite run.resume", problem, "Keep one of them"
        if self.overwrite and self.resume == "must":
            yield "run.overwrite run.resume", "overwriting deletes the run that must be resumed", "Keep one of them"

    def example(self) -> str:
        """The newest run below `root`, for hints; a name to be filled in where there is none."""
        root = Path(self.root).expanduser()
        found = [path for pattern in ("*/run.json", "*/*/run.json") for path in root.glob(pattern)]
        return str(max(found, key=lambda path: path.stat().st_mtime).parent) if found else f"{root}/NAME"


@dataclass
class ScaleConfig:
    """Name of the size; the numbers it stands for are filled into model.* and train.*."""

    name: str = key("tiny", "Name of the size, chosen with scale=NAME; part of the run's name and key of the lr table.")
