"""Refuses what `analyze` and `probe` cannot do."""

from __future__ import annotations

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
    numbers = {"analyze": "analysis.json", "probe": "probe.json"}[verb]
    if (out / "page.html").exists() and not (out / numbers).exists():
        problem = f"{verb}.out={section.out}: {out / 'page.html'} is not of an earlier {verb}"
        raise mistake(problem, "Name another directory, or remove it")
