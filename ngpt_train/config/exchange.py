"""Refuses an `export` or `import` that lacks what it needs."""

from __future__ import annotations

from ngpt_train.config.sections.exchange import ExportConfig, ImportConfig
from ngpt_train.config.validate import mistake


def check_exchange(verb: str, section: ExportConfig | ImportConfig) -> None:
    """Raises ConfigError where a name is missing, or an option has no effect."""
    if isinstance(section, ImportConfig) and section.source is None:
        fix = "For example import.source=exports/model, or import.source=HuggingFaceTB/SmolLM2-135M"
        raise mistake("import.source=null: no model is named", fix)
    if section.out is None:
        what = "model" if verb == "export" else "run"
        raise mistake(f"{verb}.out=null: no directory is named", f"For example {verb}.out={verb}ed/{what}")
