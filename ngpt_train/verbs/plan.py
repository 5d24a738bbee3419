"""`plan`: parameters, memory, FLOPs and hours of a run, without training and without a GPU."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.data import load_tokenizer
from ngpt_train.data.prepared.shards import MANIFEST, read_manifest
from ngpt_train.data.tokenizers import known_vocabulary
from ngpt_train.report.plan import describe_plan, make_plan


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints the plan, and writes it to plan.out as JSON; returns 0. Under torchrun rank 0 alone does so.

    Raises ConfigError for what does not fit plan.world_size ranks, DataError where a tokenizer's file is missing.
    """
    if os.environ.get("RANK", "0") != "0":
        return 0
    if config.model.vocab_size == AUTO:
        config = replace(config, model=replace(config.model, vocab_size=planned_vocabulary(config)))
    plan = make_plan(config, overrides)
    print(describe_plan(plan))
    if config.plan.out is not None:
        out = Path(config.plan.out).expanduser()
        write_json(out, plan)
        print(f"\nwritten to {out}")
    return 0


def planned_vocabulary(config: Config) -> int:
    """The vocabulary size that `train` would find, without reading text. Raises DataError where a file is missing."""
    if config.data.kind == "tokens":
        directory = Path(config.data.path or "").expanduser()
        if not directory.is_dir():
            raise DataError(
                f"data.path={config.data.path}: not a directory, so the vocabulary of its tokens is unknown. "
                "Name the directory, or say the number with model.vocab_size."
            )
        if (directory / MANIFEST).exists():
            return int(read_manifest(directory)["tokenizer"]["vocab_size"])
    tokenizer = config.tokenizer
    if (known := known_vocabulary(tokenizer.kind)) is not None:  # its file might have to be downloaded
        return known
    if tokenizer.path is None and config.data.kind != "tokens":
        return tokenizer.vocab_size  # of the SentencePiece model, or at most so many words, that `train` would make
    return load_tokenizer(tokenizer).vocab_size
