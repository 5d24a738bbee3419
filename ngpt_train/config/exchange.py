"""Refuses an `export` or `import` that lacks what it needs."""

from __future__ import annotations

from ngpt_train.config.schema import Config
from ngpt_train.config.validate import mistake


def check_exchange(config: Config, verb: str) -> None:
    """Raises ConfigError where `export` or `import` has no name for what it reads or writes."""
    if verb == "import" and config.import_.source is None:
        fix = "For example import.source=exported/model, or import.source=HuggingFaceTB/SmolLM2-135M"
        raise mistake("import.source=null: no model is named", fix)
    for of_verb, out in (("export", config.export.out), ("import", config.import_.out)):
        if verb == of_verb and out is None:
            example = "exported/model" if verb == "export" else "runs/imported"
            raise mistake(f"{verb}.out=null: no directory is named", f"For example {verb}.out={example}")
