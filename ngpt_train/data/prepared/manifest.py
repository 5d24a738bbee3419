"""What a manifest of a prepared directory may say, so that a damaged or forged one is refused before it is followed."""

from __future__ import annotations

import re
from typing import Any, TypeGuard

DTYPES = ("<u1", "<u2", "<u4")
MOST = 2**53  # tokens; JSON's numbers are exact below it


def problem_of(manifest: dict[str, Any]) -> str | None:
    """What is wrong with the parts of a manifest by which files are opened, or None."""
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
