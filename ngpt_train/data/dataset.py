"""A data set on disk: what `prepare` wrote, nanoGPT's files or Megatron's, checked and opened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.mixture import Mixture
from ngpt_train.data.prepared.megatron import find_megatron, open_megatron
from ngpt_train.data.prepared.shards import Tokens, map_tokens, open_shards
from ngpt_train.data.streamed.workers import StreamedText
from ngpt_train.data.tokenizers import Tokenizer, load_tokenizer, read_tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
STEMS = {"train": "train", "validation": "val"}


@dataclass(frozen=True)
class Mixed:
    """The training text of several data sets."""

    mixture: Mixture
    parts: tuple[Dataset, ...]


@dataclass(frozen=True)
class Dataset:
    """Both splits, and what identifies them: the same token ids and tokenizer have the same fingerprint."""

    train: Tokens | StreamedText | Mixed
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    path: Path
    manifest: dict[str, Any]

    @property
    def commits(self) -> dict[str, str | None]:
        """Of data sets of the hub, as `config.mixture.commits_of` names them."""
        source = self.manifest["source"]
        if source["kind"] != "mixture":
            return {"": source.get("revision")}
        return {name: part.get("revision") for name, part in source["sources"].items()}


def cache_directory(config: Config) -> Path:
    return Path(config.data.cache).expanduser()


def fingerprint(tokenizer: str, splits: dict[str, dict[str, Any]]) -> str:
    """Identity of a data set from the tokenizer's fingerprint and the sha256 of the ids of each split."""
    return canonical_hash({"tokenizer": tokenizer, **{split: splits[split]["sha256"] for split in STEMS}})


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a prepared directory. Raises DataError if there is none or it is unreadable."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["version"]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from None
    if version != FORMAT:
        raise DataError(f"{path}: format version {version}, this program reads {FORMAT}; prepare the text again")
    return manifest


def open_prepared(directory: Path, hashes: FileHashes) -> Dataset:
    """Opens a directory that `prepare` wrote. Raises DataError if any file differs from the manifest."""
    manifest = read_manifest(directory)
    try:
        train, validation = (open_shards(split, directory, manifest, hashes) for split in STEMS)
        tokenizer = read_tokenizer(directory, manifest["tokenizer"])
        found = fingerprint(tokenizer.fingerprint, manifest["splits"])
        if found != manifest["fingerprint"]:
            raise ValueError("its fingerprint does not fit its content")
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(directory / MANIFEST, error) from None
    return Dataset(train, validation, tokenizer, found, directory, manifest)


def open_tokens(config: Config, hashes: FileHashes, tokenizer: Tokenizer | None = None) -> Dataset:
    """Opens `data.path`: a directory of prepared shards or of nanoGPT's train.bin and val.bin, or Megatron's files.

    Prepared shards bring their tokenizer; the others need `tokenizer`, or the one that `config.tokenizer` names.
    Raises DataError if they are damaged or of another tokenizer.
    """
    directory = Path(config.data.path or "").expanduser()
    if (directory / MANIFEST).exists():
        return open_prepared(directory, hashes)
    if (files := find_megatron(directory)) is not None:
        tokenizer = tokenizer or load_tokenizer(config.tokenizer)
        splits = open_megatron(files, tokenizer, hashes, config.data.val_fraction)
        return _foreign("megatron", directory, tokenizer, splits)
    return _open_nanogpt(directory, config, hashes, tokenizer)


def _open_nanogpt(directory: Path, config: Config, hashes: FileHashes, tokenizer: Tokenizer | None) -> Dataset:
    """uint16 ids without a header."""
    files = {split: directory / f"{stem}.bin" for split, stem in STEMS.items()}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            f"data.path={config.data.path}: not a directory with {MANIFEST}, which `prepare` writes, nor with "
            f"nanoGPT's train.bin and val.bin (missing: {', '.join(missing)}), nor Megatron's .bin and .idx"
        )
    for file in files.values():
        size = file.stat().st_size
        if size == 0 or size % 2:
            raise DataError(f"{file}: {size} bytes, which is no number of uint16 ids; copy it again")
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    splits = {}
    for split, file in files.items():
        ids = map_tokens(file, np.dtype("<u2"), {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size}, hashes)
        splits[split] = (Tokens(split, directory, [ids], tokenizer.eos), hashes.tokens(file, "<u2")[0])
    return _foreign("nanogpt", directory, tokenizer, splits)


def _foreign(kind: str, path: Path, tokenizer: Tokenizer, splits: dict[str, tuple[Tokens, str]]) -> Dataset:
    """Of files that say nothing of their tokenizer; `splits` are tokens and what identifies their ids."""
    entry = {"kind": tokenizer.kind, "name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}
    described = {split: {"tokens": len(tokens), "sha256": sha256} for split, (tokens, sha256) in splits.items()}
    found = fingerprint(tokenizer.fingerprint, described)
    manifest = {"source": {"kind": kind}, "tokenizer": entry, "fingerprint": found, "splits": described}
    return Dataset(splits["train"][0], splits["validation"][0], tokenizer, found, path, manifest)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: damaged ({type(error).__name__}: {error}); copy the directory again, or delete it and prepare again"
    )
