"""Token shards on disk: a split read as one sequence of ids. docs/data.md documents the files."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_whole
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.prepared.manifest import problem_of
from ngpt_train.data.stored_numbers import StoredNumbers

FORMAT = 1
MANIFEST = "manifest.json"
STEMS = {"train": "train", "validation": "val"}  # of the files of each split


class Tokens:
    """One split as one long sequence of token ids over shards on disk, each document with `eos` at its end.

    offsets: of each shard the start of each document and the end of the last; without them the documents are
    found by `eos`.
    """

    def __init__(
        self,
        split: str,
        path: Path,
        shards: Sequence[NDArray[np.integer] | StoredNumbers],
        eos: int,
        offsets: Sequence[NDArray[np.integer] | StoredNumbers] | None = None,
    ):
        self.split, self.path, self.eos = split, path, eos
        self._shards, self._offsets = shards, offsets
        self._starts = list(itertools.accumulate(map(len, shards), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def shard_lengths(self) -> list[int]:
        """Ids of each shard; of the held-out text of a mixture, of each source."""
        return [len(shard) for shard in self._shards]

    def documents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and length, eos included, of each document, in order. Looked for once: a large split takes minutes."""
        return self._documents

    @functools.cached_property
    def _documents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts, lengths = [], []
        for shard, ids in enumerate(self._shards):
            if self._offsets is not None:
                stored = self._offsets[shard]
                if isinstance(stored, StoredNumbers):
                    _check_offsets(stored)
                offsets = stored[:].astype(np.int64)
            else:
                chunks = ids.chunks() if isinstance(ids, StoredNumbers) else [(0, ids)]
                ends = np.concatenate([np.flatnonzero(part == self.eos) + start + 1 for start, part in chunks])
                tail = [len(ids)] if not len(ends) or ends[-1] < len(ids) else []
                offsets = np.concatenate([[0], ends, tail]).astype(np.int64)
            starts.append(offsets[:-1] + self._starts[shard])
            lengths.append(np.diff(offsets))
        return np.concatenate(starts), np.concatenate(lengths)

    def read(self, start: int, out: NDArray[np.int64]) -> None:
        """Fills `out` with the tokens from `start` on; before the first there is eos, which opens its document."""
        assert start >= -1
        assert start + len(out) <= len(self)
        if start < 0:
            out[0] = self.eos
            start, out = 0, out[1:]
        done = 0
        shard = bisect.bisect_right(self._starts, start) - 1
        while done < len(out):
            offset = start + done - self._starts[shard]
            part = self._shards[shard][offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            shard += 1


def fingerprint(tokenizer: str, splits: dict[str, dict[str, Any]]) -> str:
    """Identity of a data set from the tokenizer's fingerprint and the sha256 of the ids of each split."""
    return canonical_hash({"tokenizer": tokenizer, **{split: splits[split]["sha256"] for split in STEMS}})


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a prepared directory. Raises DataError if there is none or it is unreadable."""
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
    if problem := problem_of(manifest):
        raise damaged_manifest(path, problem)
    return manifest


def damaged_manifest(path: Path, error: Exception | str) -> DataError:
    problem = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return DataError(f"{path}: damaged ({problem}); copy the directory again, or delete it and prepare again")


def check_length(split: str, n_tokens: int, context: int, where: str) -> None:
    """Raises DataError if `n_tokens` are less than one row of `context` + 1."""
    if n_tokens < context + 1:
        raise DataError(
            f"{where}: the {split} split has {n_tokens} tokens, less than one row (model.context + 1 = {context + 1}); "
            "add text, shorten model.context"
            + (" or raise data.val_fraction" if split == "validation" else " or lower data.val_fraction")
        )


def open_shards(split: str, directory: Path, manifest: dict[str, Any], hashes: FileHashes) -> Tokens:
    """Opens one split of a prepared directory after checking each file against the manifest.

    Raises DataError for a file that is missing, of another size or content, or holds ids beyond the vocabulary.
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
            raise DataError(f"{index}: its documents are not those of {path.name}; {_AGAIN}")
    return Tokens(split, directory, shards, manifest["tokenizer"]["eos"], offsets)


def open_ids(
    path: Path, dtype: np.dtype[Any], tokenizer: dict[str, Any], hashes: FileHashes, sha256: str | None = None
) -> StoredNumbers:
    """A file of ids, its checksum (if one is given) and the range of its ids checked."""
    found, largest = hashes.tokens(path, dtype.str)
    if sha256 is not None:
        _check_hash(path, found, sha256)
    if largest >= tokenizer["vocab_size"]:
        raise DataError(
            f"{path}: holds id {largest}, but tokenizer {tokenizer['name']} has ids below {tokenizer['vocab_size']}; "
            "choose the tokenizer that made the file"
        )
    return StoredNumbers(path, dtype)


def _check_offsets(offsets: StoredNumbers) -> None:
    """Raises DataError unless each document ends after it begins; reads a part after the other."""
    before = -1
    for _, part in offsets.chunks():
        numbers = part.astype(np.int64)
        if (np.diff(numbers, prepend=before) <= 0).any():
            raise DataError(f"{offsets.path}: its documents do not follow one another; {_AGAIN}")
        before = int(numbers[-1])


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), but the manifest lists it; {_AGAIN}") from None
    if size != expected:
        raise DataError(f"{path}: {size} bytes, but the manifest says {expected}; {_AGAIN}")


def _check_hash(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(f"{path}: sha256 {found[:16]}..., but the manifest says {expected[:16]}...; {_AGAIN}")


_AGAIN = "copy the directory again, or delete it and prepare it again"
