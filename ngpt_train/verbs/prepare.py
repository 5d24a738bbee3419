"""`prepare`: tokenizes text into shards on disk, in data.out or in the cache."""

import os
from collections.abc import Sequence
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Dataset
from ngpt_train.data.prepared_text import prepare_dataset


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prepares the text, unless the directory holds it already, and prints what the directory holds; returns 0. Raises
    DataError where the text cannot be read, or data.out holds something else."""
    out = None if config.data.out is None else Path(os.path.realpath(Path(config.data.out).expanduser()))
    dataset = prepare_dataset(config, out)
    # Under torchrun all ranks come here: one of them prepares, the others wait for it.
    if os.environ.get("RANK", "0") == "0":
        _report(dataset)
    return 0


def _report(dataset: Dataset) -> None:
    source, splits = dataset.manifest["source"], dataset.manifest["splits"]
    n_tokens = sum(split["tokens"] for split in splits.values())
    print(f"path               {dataset.path}")
    print(f"tokenizer          {dataset.tokenizer.name}")
    print(f"documents          {source['documents']:,} ({source['skipped_empty']:,} empty ones skipped)")
    for name, split in splits.items():
        print(f"{name + ' tokens':<18} {split['tokens']:,} in {split['documents']:,} documents")
    print(f"bytes per token    {source['bytes'] / n_tokens:.3f}")
    print(f"fingerprint        {dataset.fingerprint}")
