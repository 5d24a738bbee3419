"""Refuses what `analyze` and `probe` cannot do."""

from __future__ import annotations

import os
from pathlib import Path

from ngpt_train.config.sections.analysis import AnalyzeConfig, ProbeConfig
from ngpt_train.config.validate import mistake, show


def check_analysis(verb: str, section: AnalyzeConfig | ProbeConfig) -> None:
    """Raises ConfigError for what `analyze` and `probe` cannot do."""
    checkpoints = section.checkpoints or []
    shown = f"{verb}.checkpoints={show(section.checkpoints)}"
    if not checkpoints:
        fix = f"For example {verb}.checkpoints=[runs/gpt,runs/ngpt]"
        raise mistake(f"{shown}: no checkpoint is named", fix)
    if len(set(checkpoints)) < len(checkpoints):
        raise mistake(f"{shown}: one is named twice", "Leave it out")
    if verb == "probe" and len(checkpoints) > 2:
        raise mistake(f"{shown}: {len(checkpoints)} models, and two can be beside each other", "Name one or two")
    if section.average > 1 and section.weights == "ema":
        fix = f"Set {verb}.average=1 or {verb}.weights=trained"
        raise mistake(f"{verb}.average={section.average}, {verb}.weights=ema: an average of averages", fix)
    if section.out is None:
        return
    out = Path(section.out).expanduser()
    if out.exists() and not out.is_dir():
        raise mistake(f"{verb}.out={section.out}: is a file", "Name a directory")
    if (out / "config.yaml").exists():
        raise mistake(f"{verb}.out={section.out}: is the directory of a run", "Name another directory")
    there_is = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    if not (there_is.is_dir() and os.access(there_is, os.W_OK)):
        raise mistake(f"{verb}.out={section.out}: {there_is} cannot be written", "Name another directory")
