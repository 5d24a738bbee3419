"""Token files for `data=tokens`: shards of `prepare`, and the files of nanoGPT and Megatron, which name no tokenizer.

docs/data.md documents the shards of `prepare` and their manifest, which is checked before use.

nanoGPT's `train.bin` and `val.bin` are ids as <u2. Megatron's `.bin` is ids, and its `.idx` has their type and the
bounds of documents: MMIDIDX and two zero bytes, version (u64, 1), code of the ids' type (u8), number of sequences
(u64), number of document bounds (u64), the length of each sequence (i32), the first byte of each sequence (i64), and
the document bounds as numbers of sequences (i64). All numbers are little-endian.
"""

import logging
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.schema import Config, TokenizerConfig
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_whole
from ngpt_train.core.recorded import COUNT, LIST, POSITIVE, TABLE, TEXT, all_checked, checked
from ngpt_train.data.cache_files import FileHashes, cache_directory, canonical_hash
from ngpt_train.data.chunks import STEMS
from ngpt_train.data.dataset import AGAIN, Dataset, StoredNumbers, Tokens
from ngpt_train.data.rows import with_rows
from ngpt_train.data.tokenizers import known_vocabulary, load_tokenizer, possible_keys, read_tokenizer, tokenizer_key
from ngpt_train.data.tokenizers.tokenizer import Ints, Tokenizer

logger = logging.getLogger(__name__)

FORMAT = 1  # version of the files of `prepare`
MANIFEST = "manifest.json"
DTYPES = ("<u1", "<u2", "<u4")
MANIFEST_FIELDS = {"tokenizer": TABLE, "source": TABLE, "splits": TABLE, "dtype": TEXT}
TOKENIZER_FIELDS = {"name": TEXT, "vocab_size": POSITIVE, "eos": COUNT}
SPLIT_FIELDS = {"shards": LIST, "sha256": TEXT, "tokens": COUNT, "documents": COUNT}
SHARD_FIELDS = {**dict.fromkeys(("file", "index", "sha256", "index_sha256"), TEXT), "tokens": COUNT, "documents": COUNT}
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Signed ids are read as unsigned: a negative id is then far beyond any vocabulary.
IDX_DTYPES = {1: "<u1", 2: "<u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}
COPY_AGAIN = "copy both files again"
# Names of the pairs if training and validation have one each.
SUFFIXES = {"train": "_train", "validation": "_val"}


def open_tokens(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """Opens `data.path`: a directory of prepared shards or of nanoGPT's train.bin and val.bin, or Megatron's files.

    tokenizer: used instead of `config.tokenizer`; prepared shards keep their own.
    Raises DataError if files are damaged or of another tokenizer.
    """
    assert config.data.path is not None
    hashes = FileHashes(cache_directory(config))
    dataset = with_rows(_open(Path(config.data.path).expanduser(), config, hashes, tokenizer), config)
    hashes.save()
    return dataset


def _open(path: Path, config: Config, hashes: FileHashes, tokenizer: Tokenizer | None) -> Dataset:
    if (path / MANIFEST).exists():
        dataset = open_prepared(path, hashes)
        _warn_of_unused(config.tokenizer, dataset)
        return dataset
    megatron = find_megatron(path)
    files = megatron or find_nanogpt(path, config.data.path)
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    splits: dict[str, tuple[Tokens, str]] = {}
    if megatron is not None:
        splits = open_megatron(files, tokenizer, hashes, config.data.val_fraction)
    else:
        for split, file in files.items():
            ids, sha256 = _open_ids(file, np.dtype("<u2"), tokenizer, hashes)
            splits[split] = (Tokens(split, path, [ids], tokenizer.eos), sha256)
    found = fingerprint(tokenizer.fingerprint, {split: {"sha256": sha256} for split, (_, sha256) in splits.items()})
    manifest = {"source": {"kind": "nanogpt" if megatron is None else "megatron"}}
    return Dataset(splits["train"][0], splits["validation"][0], tokenizer, found, path, manifest)


def _warn_of_unused(chosen: TokenizerConfig, dataset: Dataset) -> None:
    """Warns if prepared shards have another tokenizer than the config's, as a paper's row may set it."""
    found = dataset.tokenizer
    if known_vocabulary(chosen.kind) is None:  # only the model file identifies such a tokenizer
        same = chosen.kind in (found.kind, TokenizerConfig().kind)
    else:
        same = tokenizer_key(chosen) in possible_keys(found)
    if not same:
        logger.warning(
            "tokenizer.kind=%s is not used: the shards in %s have tokens of %s", chosen.kind, dataset.path, found.name
        )


def find_nanogpt(directory: Path, given: str | None) -> dict[str, Path]:
    """The file of each split. given: data.path. Raises DataError if a file is absent or has no ids."""
    files = {split: directory / f"{stem}.bin" for split, stem in STEMS.items()}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            f"data.path={given}: not a directory with {MANIFEST}, which `prepare` writes, nor with "
            f"nanoGPT's train.bin and val.bin (missing: {', '.join(missing)}), nor Megatron's .bin and .idx"
        )
    for file in files.values():
        size = file.stat().st_size
        if size == 0 or size % 2:
            raise DataError(f"{file}: {size} bytes, which is no number of uint16 ids; copy it again")
    return files


def find_megatron(path: Path) -> dict[str, Path] | None:
    """The pair of each split, without .bin and .idx. One pair for both splits has to be divided.

    path: a directory, or a pair with or without an ending. None if it is not Megatron's. Raises DataError for a
    directory with several corpora.
    """
    if not path.is_dir():
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if _file(prefix, ".idx").is_file():
            return dict.fromkeys(SUFFIXES, prefix)
        pairs = {split: _file(prefix, suffix) for split, suffix in SUFFIXES.items()}
        return pairs if all(_file(pair, ".idx").is_file() for pair in pairs.values()) else None
    names = {index.name.removesuffix(".idx") for index in path.glob("*.idx") if _has_magic(index)}
    if names == {"train", "val"}:
        return {"train": path / "train", "validation": path / "val"}
    bases = {name.removesuffix("_train").removesuffix("_val") for name in names}
    if len(bases) > 1:
        raise DataError(
            f"data.path={path}: holds {len(bases)} corpora in Megatron's format ({', '.join(sorted(bases)[:5])}, ...); "
            f"name one, such as data.path={path / min(bases)}"
        )
    return find_megatron(path / bases.pop()) if bases else None


def open_megatron(
    files: dict[str, Path], tokenizer: Tokenizer, hashes: FileHashes, val_fraction: float
) -> dict[str, tuple[Tokens, str]]:
    """Each split, and a hash of its ids. The last documents of a single pair validate. Raises DataError if files are
    damaged or of another tokenizer, or if a document does not end with eos."""
    pairs = {prefix: _open_pair(prefix, tokenizer, hashes) for prefix in dict.fromkeys(files.values())}
    splits = {}
    for split, prefix in files.items():
        ids, offsets, sha256 = pairs[prefix]
        if len(pairs) == 1:
            n_documents = len(offsets) - 1
            cut = n_documents - _held_out(n_documents, val_fraction)
            if cut <= 0:
                raise DataError(
                    f"{_file(prefix, '.idx')}: of {n_documents} documents data.val_fraction={val_fraction} leaves none "
                    f"for training; lower it, or make the validation split a pair of its own, {prefix.name}_val, "
                    f"beside {prefix.name}_train"
                )
            offsets = offsets[: cut + 1] if split == "train" else offsets[cut:]
            start, end = int(offsets[0]), int(offsets[-1])
            ids, offsets, sha256 = ids.between(start, end), offsets - start, canonical_hash([sha256, start, end])
        splits[split] = (Tokens(split, prefix, [ids], tokenizer.eos, [offsets]), sha256)
    return splits


def count_tokens(config: Config) -> int:
    """Tokens of the training split of `data.path`, from a manifest, file sizes or Megatron's index alone. Raises
    DataError if there are no such files."""
    path, val_fraction = Path(config.data.path or "").expanduser(), config.data.val_fraction
    if (path / MANIFEST).exists():
        return int(read_manifest(path)["splits"]["train"]["tokens"])
    megatron = find_megatron(path)
    if megatron is None:
        return find_nanogpt(path, config.data.path)["train"].stat().st_size // 2
    ids, index = (_file(megatron["train"], ending) for ending in (".bin", ".idx"))
    offsets = _read_index(index, ids.stat().st_size)[1]
    held_out = _held_out(len(offsets) - 1, val_fraction) if megatron["train"] == megatron["validation"] else 0
    return int(offsets[max(0, len(offsets) - 1 - held_out)])


def _held_out(n_documents: int, val_fraction: float) -> int:
    return max(1, round(val_fraction * n_documents))


def _open_pair(prefix: Path, tokenizer: Tokenizer, hashes: FileHashes) -> tuple[StoredNumbers, Ints, str]:
    """The ids; the start of each document, and the end of the last; the sha256 of the ids."""
    index, path = _file(prefix, ".idx"), _file(prefix, ".bin")
    try:
        size = path.stat().st_size
        dtype, offsets = _read_index(index, size)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); {COPY_AGAIN}") from None
    if size != offsets[-1] * dtype.itemsize:
        expected = int(offsets[-1]) * dtype.itemsize
        raise DataError(f"{path}: {size} bytes, but {index.name} says {expected}; {COPY_AGAIN}")
    if offsets[-1] == 0:
        raise DataError(f"{path}: no tokens")
    ids, sha256 = _open_ids(path, dtype, tokenizer, hashes)
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise DataError(f"{index}: document {empty[0]} is empty; prepare the text again without empty documents")
    places, last = offsets[1:] - 1, np.empty(len(offsets) - 1, np.int64)
    for start, part in ids.chunks():
        here = slice(*np.searchsorted(places, [start, start + len(part)]))
        last[here] = part[places[here] - start]
    wrong = np.flatnonzero(last != tokenizer.eos)
    if len(wrong):
        raise DataError(
            f"{path}: document {wrong[0]} ends with id {last[wrong[0]]}, and not with {tokenizer.eos}, the eos of "
            f"tokenizer {tokenizer.name} ({len(wrong):,} of {len(last):,} documents do so). Choose the tokenizer that "
            "made the file; or, if it was made without --append-eod, make it again with it"
        )
    return ids, offsets, sha256


def _read_index(index: Path, n_bytes: int) -> tuple[np.dtype, Ints]:
    """The type of the ids, and the document bounds as numbers of ids. n_bytes: size of the ids' file."""
    data = np.memmap(index, np.uint8, mode="r") if index.stat().st_size else np.empty(0, np.uint8)
    if len(data) < HEADER.size or not _has_magic(index):
        raise DataError(f"{index}: not an index of Megatron's (it does not begin with MMIDIDX); {COPY_AGAIN}")
    _, version, code, n_sequences, n_bounds = HEADER.unpack(data[: HEADER.size].tobytes())
    if version != 1:
        raise DataError(f"{index}: version {version}, this program reads 1; make it with Megatron-LM or Megatron Core")
    if code not in IDX_DTYPES:
        known = ", ".join(map(str, IDX_DTYPES))
        raise DataError(f"{index}: ids of type {code}, known are {known} (integers); make the file with integer ids")
    expected = HEADER.size + 12 * n_sequences + 8 * n_bounds
    # Multimodal files have one more byte for each sequence, without meaning for text.
    if len(data) not in (expected, expected + n_sequences):
        raise DataError(f"{index}: {len(data)} bytes, but its header says {expected}; {COPY_AGAIN}")
    if max(n_sequences, n_bounds - 1) > n_bytes:
        raise DataError(f"{index}: {n_sequences} sequences, but the ids have {n_bytes} bytes; {COPY_AGAIN}")
    dtype = np.dtype(IDX_DTYPES[code])
    lengths = np.ndarray(n_sequences, "<i4", data, HEADER.size)
    firsts = np.ndarray(n_sequences, "<i8", data, HEADER.size + 4 * n_sequences)
    bounds = np.ndarray(n_bounds, "<i8", data, HEADER.size + 12 * n_sequences)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    in_order = n_bounds > 0 and bounds[0] == 0 and bounds[-1] == n_sequences and np.all(np.diff(bounds) >= 0)
    if not in_order or np.any(lengths < 0) or not np.array_equal(firsts, starts[:-1] * dtype.itemsize):
        raise DataError(f"{index}: its sequences or documents do not follow one another; {COPY_AGAIN}")
    return dtype, starts[bounds]


def _has_magic(index: Path) -> bool:
    with index.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def open_prepared(directory: Path, hashes: FileHashes) -> Dataset:
    """Opens a directory written by `prepare`. Raises DataError if a file differs from the manifest."""
    manifest = read_manifest(directory)
    tokenizer = read_tokenizer(directory, manifest["tokenizer"])
    train, validation = (_open_shards(split, directory, manifest, tokenizer, hashes) for split in STEMS)
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
        raise damaged_manifest(path, f"{type(error).__name__}: {error}") from None
    if version != FORMAT:
        raise DataError(f"{path}: format version {version}, this program reads {FORMAT}; prepare the text again")
    _check_manifest(manifest, path)
    return manifest


def _check_manifest(manifest: Any, path: Path) -> None:
    """Raises DataError for a fault. Checks all entries that open files."""
    where, fix = f"{path}: damaged", f"{AGAIN.capitalize()}."
    checked(manifest, MANIFEST_FIELDS, where, MANIFEST_FIELDS, fix)
    tokenizer = checked(manifest["tokenizer"], TOKENIZER_FIELDS, f"{where}: tokenizer", TOKENIZER_FIELDS, fix)
    if tokenizer["eos"] >= tokenizer["vocab_size"]:
        raise damaged_manifest(path, f"its tokenizer has eos={tokenizer['eos']} of {tokenizer['vocab_size']} ids")
    if manifest["dtype"] not in DTYPES:
        raise damaged_manifest(path, f"its dtype is {manifest['dtype'][:100]!r}")
    for split in STEMS:
        of_split = checked(manifest["splits"].get(split), SPLIT_FIELDS, f"{where}: {split} split", SPLIT_FIELDS, fix)
        shards = all_checked(of_split["shards"], SHARD_FIELDS, f"{where}: shards of {split}", SHARD_FIELDS, fix)
        problems = [_problem_of_shard(shard) for shard in shards] or ["there are no shards"]
        for name in ("tokens", "documents"):
            if of_split[name] != sum(shard[name] for shard in shards):
                problems.append(f"there are {of_split[name]} {name}, which is not the sum of its shards")
        if problem := next(filter(None, problems), None):
            raise damaged_manifest(path, f"in its {split} split {problem}")


def _problem_of_shard(shard: dict[str, Any]) -> str | None:
    for name in (shard["file"], shard["index"]):
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}", name):
            return f"a shard is called {name[:100]!r}"
    for sha256 in (shard["sha256"], shard["index_sha256"]):
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            return f"{shard['file']} has the sha256 {sha256[:100]!r}"
    # Each document has its eos at least.
    counts = f"{shard['documents']} documents of {shard['tokens']} tokens"
    return f"{shard['file']} has {counts}" if shard["documents"] > shard["tokens"] else None


def damaged_manifest(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: damaged ({problem}); copy the directory again, or delete it and prepare again")


def _open_shards(
    split: str, directory: Path, manifest: dict[str, Any], tokenizer: Tokenizer, hashes: FileHashes
) -> Tokens:
    """A split of a prepared directory. Raises DataError if a file does not fit the manifest or the vocabulary."""
    dtype = np.dtype(manifest["dtype"])
    shards, offsets = [], []
    for shard in manifest["splits"][split]["shards"]:
        index, path = directory / shard["index"], directory / shard["file"]
        _check_size(index, (shard["documents"] + 1) * 8)
        _check_hash(index, hashes.sha256(index), shard["index_sha256"])
        _check_size(path, shard["tokens"] * dtype.itemsize)
        shards.append(_open_ids(path, dtype, tokenizer, hashes, shard["sha256"])[0])
        offsets.append(StoredNumbers(index, "<u8"))
        if [*offsets[-1][:1], *offsets[-1][-1:]] != [0, shard["tokens"]]:
            raise DataError(f"{index}: its documents do not fit {path.name}; {AGAIN}")
    return Tokens(split, directory, shards, tokenizer.eos, offsets)


def _open_ids(
    path: Path, dtype: np.dtype[Any], tokenizer: Tokenizer, hashes: FileHashes, sha256: str | None = None
) -> tuple[StoredNumbers, str]:
    """A file of ids and its checksum, after a check of its ids' range and, if given, of its checksum."""
    found, largest = hashes.tokens(path, dtype.str)
    if sha256 is not None:
        _check_hash(path, found, sha256)
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{path}: holds id {largest}, but tokenizer {tokenizer.name} has ids below {tokenizer.vocab_size}; "
            "choose the tokenizer that made the file"
        )
    return StoredNumbers(path, dtype), found


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
