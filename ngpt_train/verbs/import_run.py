"""`import`: a model of another program as a run."""

import logging
from collections.abc import Sequence
from pathlib import Path

from ngpt_train.config.arguments import name_of
from ngpt_train.config.places import check_free
from ngpt_train.config.schema import Config
from ngpt_train.interop.importing import read_model, write_run

logger = logging.getLogger(__name__)


def main(config: Config, overrides: Sequence[str]) -> int:
    """Makes the run directory import.out of the model import.source, and prints what it is; returns 0. Raises
    ConfigError for a directory that is not empty, DataError for a model that cannot be read or does not fit."""
    own = config.import_
    assert own.source is not None  # check_verb refuses null
    assert own.out is not None
    out = Path(own.out).expanduser()
    check_free("import.out", out)
    sections = [name_of(override).partition(".")[0] for override in overrides]
    if unused := sorted(set(sections) - {"import", "tokenizer"}):
        logger.info("import makes no use of %s", ", ".join(unused))
    imported = read_model(own.source, own.revision, config.tokenizer if "tokenizer" in sections else None)
    write_run(imported, own.source, out)
    model = imported.config.model
    at = f" at {imported.revision}" if imported.revision else ""
    print(f"{own.source}{at}, {imported.form}: model={model.name}, {len(imported.tensors)} tensors")
    print(f"tokenizer {imported.tokenizer.name}, whose id {imported.tokenizer.eos} ends a text")
    for note in imported.notes:
        print(note)
    print(f"written to {out}: name it in evaluate, generate, analyze, export or run.init_from")
    return 0
