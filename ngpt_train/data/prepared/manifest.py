"""A directory written by `prepare`: its manifest, which is checked before use, and its shards.

docs/data.md documents the files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_whole
from ngpt_train.data.dataset import Dataset
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.prepared.chunks import STEMS
from ngpt_train.data.token_sequence import AGAIN, StoredNumbers, Tokens
from ngpt_train.data.tokenizers import read_tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
DTYPES = ("<u1", "<u2", "<u4")
MOST = 2**53  # tokens; JSON's numbers are exact below


def open_prepared(directory: Path, hashes: FileHashes) -> Dataset:
    """Opens a directory written by `prepare`. Raises DataError if a file differs from the manifest."""
    manifest = read_manifest(directory)
    train, validation = (open_shards(split, directory, manifest, hashes) for split in STEMS)
    tokenizer = read_tokenizer(directory, manifest["tokenizer"])
    found = fingerprint(tokenizer.fingerprint, manifest["splits"])
    if found != manifest.get("fingerprint"):
        raise damaged_manifest(directory / MANIFEST, "its fingerprint does not fit its content")
    return Dataset(train, validation, tokenizer, found, directory, manifest)


def fingerprint(tokenizer: str, splits: dict[str, dict[str, Any]]) -> str:
    """A data set's identity, from its tokenizer's fingerprint and the sha256 of each split's ids."""
    return canonical_hash({"tokenizer": tokenizer, **{split: splits[split]["sha256"] for split in STEMS}})


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a prepared directory. Raises DataError if it is absent or damaged."""
    path = directory / MANIFEST
    try:
        manifest = parse_json(read_whole(path))
        version = manifest["version"]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise damaged_manifest(path, error) from None
    if version != FORMAT:
        raise DataError(f"{path}: format version {version}, this program reads {FORMAT}; prepare the text again")
    if problem := _problem_of(manifest):
        raise damaged_manifest(path, problem)
    return manifest


def damaged_manifest(path: Path, error: Exception | str) -> DataError:
    problem = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return DataError(f"{path}: damaged ({problem}); copy the directory again, or delete it and prepare again")


def open_shards(split: str, directory: Path, manifest: dict[str, Any], hashes: FileHashes) -> Tokens:
    """Opens a split of a prepared directory, after a check of each file against the manifest.

    Raises DataError if a file is missing, has another size or content, or has ids beyond the vocabulary.
    """
    dtype = np.dtype(manifest["dtype"])
    shards, offsets = [], []
    for shard in manifest["splits"][split]["shards"]:
        index, path = directory / shard["index"], directory / shard["file"]
        _check_size(index, (shard["documents"] + 1) * 8)
        _check_hash(index, hashes.sha256(index), shard["index_sha256"])
        _check_size(path, shard["tokens"] * dtype.itemsize)
        shards.append(open_ids(path, dtype, manifest["tokenizer"], hashes, shard["sha256"]))
        offsets.append(StoredNumbers(index, "<u8"))
        if [*offsets[-1][:1], *offsets[-1][-1:]] != [0, shard["tokens"]]:
            raise DataError(f"{index}: its documents do not fit {path.name}; {AGAIN}")
    return Tokens(split, directory, shards, manifest["tokenizer"]["eos"], offsets)


def open_ids(
    path: Path, dtype: np.dtype[Any], tokenizer: dict[str, Any], hashes: FileHashes, sha256: str | None = None
) -> StoredNumbers:
    """Opens a file of ids, after a check of its ids' range and, if given, of its checksum."""
    found, largest = hashes.tokens(path, dtype.str)
    if sha256 is not None:
        _check_hash(path, found, sha256)
    if largest >= tokenizer["vocab_size"]:
        raise DataError(
            f"{path}: holds id {largest}, but tokenizer {tokenizer['name']} has ids below {tokenizer['vocab_size']}; "
            "choose the tokenizer that made the file"
        )
    return StoredNumbers(path, dtype)


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), but the manifest lists it; {AGAIN}") from None
    if size != expected:
        raise DataError(f"{path}: {size} bytes, but the manifest says {expected}; {AGAIN}")


def _check_hash(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(f"{path}: sha256 {found[:16]}..., but the manifest says {expected[:16]}...; {AGAIN}")


def _problem_of(manifest: dict[str, Any]) -> str | None:
    """The fault of a manifest, or None. Checks all entries that open files."""
    tokenizer, splits = manifest.get("tokenizer"), manifest.get("splits")
    if not isinstance(tokenizer, dict) or not isinstance(manifest.get("source"), dict):
        return "it does not describe its tokenizer and its source"
    vocab_size, eos = tokenizer.get("vocab_size"), tokenizer.get("eos")
    if not _is_count(vocab_size) or not _is_count(eos) or eos >= vocab_size:
        return f"its tokenizer has eos={_shown(eos)} and vocab_size={_shown(vocab_size)}"
    if not isinstance(tokenizer.get("name"), str):
        return f"its tokenizer is called {_shown(tokenizer.get('name'))}"
    if manifest.get("dtype") not in DTYPES:
        return f"its dtype is {_shown(manifest.get('dtype'))}"
    if not isinstance(splits, dict):
        return "it has no splits"
    for split in ("train", "validation"):
        problem = _problem_of_split(splits.get(split))
        if problem:
            return f"in its {split} split {problem}"
    return None


def _problem_of_split(split: Any) -> str | None:
    shards = split.get("shards") if isinstance(split, dict) else None
    if not isinstance(shards, list) or not shards:
        return "there are no shards"
    for shard in shards:
        if not isinstance(shard, dict):
            return "a shard is no object"
        for name in (shard.get("file"), shard.get("index")):
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}", name):
                return f"a shard is called {_shown(name)}"
        for sha256 in (shard.get("sha256"), shard.get("index_sha256")):
            if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
                return f"{shard['file']} has the sha256 {_shown(sha256)}"
        tokens, documents = shard.get("tokens"), shard.get("documents")
        # Each document has its eos at least.
        if not _is_count(tokens) or not _is_count(documents) or documents > tokens:
            return f"{shard['file']} has {_shown(documents)} documents of {_shown(tokens)} tokens"
    if not isinstance(split.get("sha256"), str):
        return "there is no sha256"
    for name in ("tokens", "documents"):
        if split.get(name) != sum(shard[name] for shard in shards):
            return f"there are {_shown(split.get(name))} {name}, which is not the sum of its shards"
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < MOST


def _shown(value: Any) -> str:
    return repr(value)[:100]
