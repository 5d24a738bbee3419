"""Megatron's files, written here as its format says and by nothing of ours."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data import Dataset, open_dataset
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.token_files import count_tokens
from tests.unit.data.test_data_prepare import config as local_config
from tests.unit.data.test_data_prepare import ids_of

EOS = 256
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write(prefix: Path, documents: list[list[int]], code: int = 8, sentences: int = 1) -> None:
    """Each document in so many sequences."""
    sizes, bounds = [], [0]
    for ids in documents:
        parts = np.array_split(np.array(ids), min(sentences, len(ids)))
        sizes += [len(part) for part in parts]
        bounds.append(len(sizes))
    np.array([i for ids in documents for i in ids]).astype(CODES[code]).tofile(f"{prefix}.bin")
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * np.dtype(CODES[code]).itemsize
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(bounds))
        + np.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    )  # fmt: skip


def documents(n: int) -> list[list[int]]:
    rng = np.random.default_rng(n)
    return [[*rng.integers(0, 120, size).tolist(), EOS] for size in rng.integers(20, 60, n)]


def config(path: Path, cache: Path) -> Config:
    return local_config(path, cache, kind="tokens", val_fraction=0.2)


def read(tokens: Tokens) -> list[list[int]]:
    ids = ids_of(tokens)
    starts, lengths = tokens.documents
    return [ids[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


def both(dataset: Dataset) -> tuple[list[list[int]], list[list[int]]]:
    return read(dataset.train), read(dataset.validation)


@pytest.mark.parametrize(("code", "ending"), [(3, ""), (4, ".bin"), (5, ".idx"), (8, "/")])
def test_the_last_documents_of_a_single_pair_validate(tmp_path: Path, code: int, ending: str) -> None:
    texts = documents(20)
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus" / "web.v2_text", texts, code, sentences=3)
    path = tmp_path / "corpus" if ending == "/" else tmp_path / "corpus" / f"web.v2_text{ending}"
    dataset = open_dataset(config(path, tmp_path / "cache"))
    assert both(dataset) == (texts[:16], texts[16:])


def test_a_pair_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "web_train", documents(8))
    write(tmp_path / "web_val", documents(3))
    fingerprints = set()
    for path in (tmp_path / "web", tmp_path):
        dataset = open_dataset(config(path, tmp_path / "cache"))
        assert both(dataset) == (documents(8), documents(3))
        fingerprints.add(dataset.fingerprint)
    write(tmp_path / "other", documents(5))
    with pytest.raises(DataError, match=r"holds 2 corpora in Megatron's format \(other, web.*data\.path=.*other"):
        open_dataset(config(tmp_path, tmp_path / "cache"))
    # The same ids are the same data, whatever file they are in.
    np.concatenate(documents(8)).astype("<u2").tofile(tmp_path / "train.bin")
    np.concatenate(documents(3)).astype("<u2").tofile(tmp_path / "val.bin")
    for index in tmp_path.glob("*.idx"):
        index.unlink()
    assert {open_dataset(config(tmp_path, tmp_path / "cache")).fingerprint} == fingerprints


def test_tokens_are_counted_without_opening_them(tmp_path: Path) -> None:
    """Caught: a count that takes held-out documents for training text."""
    write(tmp_path / "alone", documents(20), 4)
    assert count_tokens(config(tmp_path / "alone", tmp_path / "cache")) == sum(map(len, documents(20)[:16]))
    (tmp_path / "alone.idx").unlink()
    write(tmp_path / "web_train", documents(8))
    write(tmp_path / "web_val", documents(3))
    assert count_tokens(config(tmp_path / "web", tmp_path / "cache")) == sum(map(len, documents(8)))


def patch(position: int, data: bytes) -> Callable[[Path], object]:
    def apply(prefix: Path) -> None:
        index = Path(f"{prefix}.idx")
        content = index.read_bytes()
        index.write_bytes(content[:position] + data + content[position + len(data) :])

    return apply


def cut(ending: str) -> Callable[[Path], object]:
    return lambda prefix: Path(f"{prefix}{ending}").write_bytes(Path(f"{prefix}{ending}").read_bytes()[:-2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (patch(0, b"x"), r"web\.idx: not an index of Megatron's"),
        (patch(9, b"\2"), r"web\.idx: version 2, this program reads 1"),
        (patch(17, b"\6"), r"web\.idx: ids of type 6, known are 1, 2, 3"),
        (patch(18, b"\1"), r"web\.idx: \d+ bytes, but its header says"),
        (cut(".idx"), r"web\.idx: \d+ bytes, but its header says"),
        (cut(".bin"), r"web\.bin: \d+ bytes, but web\.idx says \d+; copy both"),
        (patch(34, b"\1"), r"web\.idx: its sequences or documents do not follow one another"),
        (lambda prefix: Path(f"{prefix}.bin").unlink(), r"web\.bin: cannot be read"),
        (lambda prefix: write(prefix, [[1, 300, EOS]] * 9), r"web\.bin: holds id 300, but tokenizer bytes"),
        (lambda prefix: write(prefix, [[1, -1, EOS]] * 9, code=4), r"web\.bin: holds id 4294967295, but"),
        (
            lambda prefix: write(prefix, [[1, EOS], [2, 3], [2, EOS]]),
            r"web\.bin: document 1 ends with id 3.*append-eod",
        ),
        (lambda prefix: write(prefix, [[1, EOS]]), r"of 1 documents data\.val_fraction=0\.2 leaves none for training"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    write(tmp_path / "web", documents(20))
    open_dataset(config(tmp_path / "web", tmp_path / "cache"))
    spoil(tmp_path / "web")
    with pytest.raises(DataError, match=message):
        open_dataset(config(tmp_path / "web", tmp_path / "cache"))
