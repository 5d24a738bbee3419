"""Reading local text: every format gives the same documents, every fault says where it is."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ngpt_train.config.schema import DataConfig
from ngpt_train.core.errors import DataError
from ngpt_train.data.sources import open_source

TEXTS = ["Ein Anfang.\r\n\tZwei\u2028Zeilen\n", "", "naïve 😀 \0 ▁", "x" * 70_000]


def compress(path: Path, data: bytes) -> Path:
    import zstandard

    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":  # two frames, as `cat a.zst b.zst` makes them
        half = len(data) // 2
        data = b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
    path.write_bytes(data)
    return path


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def parquet(path: Path, columns: Mapping[str, Sequence[object]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def read(path: Path | str, field: str = "text") -> list[str]:
    return list(open_source(DataConfig(kind="local", path=str(path), text_field=field)).documents())


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_formats_keep_every_character(tmp_path: Path, ending: str) -> None:
    assert read(compress(tmp_path / f"a.jsonl{ending}", b"\xef\xbb\xbf" + jsonl(TEXTS) + b"\n")) == TEXTS
    for text in TEXTS:
        assert read(compress(tmp_path / f"a.txt{ending}", text.encode())) == [text]
    assert read(parquet(tmp_path / "a.parquet", {"n": [1, 2, 3, 4], "text": TEXTS})) == TEXTS


def test_directories_and_globs_are_sorted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "sub/a.txt", "a10.txt", "a9.txt", "notes.md", ".hidden.txt"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a10.txt", "a9.txt", "b.txt", "sub/a.txt"]
    assert "1 other files are not read, such as" in caplog.text
    assert read(f"{tmp_path}/a*.txt") == ["a10.txt", "a9.txt"]
    assert read(f"{tmp_path}/**/a*.txt") == ["a10.txt", "a9.txt", "sub/a.txt"]


def cut(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def build(directory: Path) -> Path:
        path = make(directory)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
        return path

    return build


def made(name: str, data: bytes) -> Callable[[Path], Path]:
    return lambda directory: compress(directory / name, data)


def table(columns: Mapping[str, Sequence[object]]) -> Callable[[Path], Path]:
    return lambda directory: parquet(directory / "a.parquet", columns)


def damaged_page(path: Path) -> Path:
    """Bytes in the middle of a parquet file, whose end describes it as before."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 3 + 300] = b"\xff" * 300
    path.write_bytes(data)
    return path


def not_utf8(path: Path) -> Path:
    import pyarrow as pa

    return parquet(path, {"text": pa.array([b"good", b"bad \xe9"] * 20, pa.binary()).view(pa.string())})


def empty(name: str) -> Callable[[Path], Path]:
    """An empty file, as a failed copy leaves it."""

    def make(directory: Path) -> Path:
        (directory / name).touch()
        return directory / name

    return make


RANDOM = json.dumps({"text": "".join(chr(33 + i * i * 7919 % 90) for i in range(60_000))}).encode()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (made("a.jsonl", b'{"text": "x"}\n\n{"body": 1, "id": 2}\n'), ["line 3", "'body', 'id'", "data.text_field"]),
        (made("a.jsonl", b'{"text": "x"}\n{"text": "y"\n'), ["a.jsonl, line 2", "not JSON"]),
        (made("a.jsonl", b'["x"]\n'), ["line 1", "list", "'text'"]),
        (made("a.jsonl", b'{"text": null}\n'), ["line 1", "NoneType", "string"]),
        (made("a.jsonl.gz", b'{"text": "x"}\n{"text": 5}\n'), ["line 2", "int", "string"]),
        (made("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n'), ["line 2", "UTF-8", "0xff"]),
        (made("a.jsonl", b'{"text": "\\ud800"}\n'), ["line 1", "surrogate", "\\ud800"]),
        (made("a.jsonl", b"[" * 100_000), ["a.jsonl, line 1", "not JSON"]),
        (made("a.txt", b"one\ntwo \xe9\n"), ["a.txt, line 2", "UTF-8", "offset 8"]),
        (cut(made("a.jsonl.gz", RANDOM)), ["a.jsonl.gz", "damaged or incomplete"]),
        (cut(made("a.jsonl.zst", RANDOM)), ["a.jsonl.zst", "damaged or incomplete"]),
        (lambda d: made("b.txt", b"plain")(d).rename(d / "a.txt.gz"), ["a.txt.gz", "damaged"]),
        (lambda d: made("b.txt", b"plain")(d).rename(d / "a.txt.zst"), ["a.txt.zst", "damaged"]),
        (table({"body": ["x"], "id": ["1"]}), ["a.parquet", "column 'text'", "'body', 'id'", "data.text_field"]),
        (table({"text": ["x", "y", None]}), ["a.parquet, row 3", "NoneType"]),
        (table({"text": [1, 2]}), ["a.parquet, row 1", "int"]),
        (cut(table({"text": ["abc"] * 100})), ["a.parquet", "damaged"]),
        (lambda d: damaged_page(table({"text": [os.urandom(50).hex()] * 300})(d)), ["a.parquet", "damaged"]),
        (lambda d: not_utf8(d / "a.parquet"), ["a.parquet, row 2", "not UTF-8", "byte 0xe9"]),
        *((empty(name), [name, "damaged"]) for name in ("a.parquet", "a.jsonl.gz", "a.txt.zst")),
        (made("a.csv", b"x"), ["a.csv", "unknown kind", ".jsonl.gz"]),
        (made("a.json", b"[]"), ["a.json", "unknown kind"]),
    ],
)
def test_faults_are_named(tmp_path: Path, make: Callable[[Path], Path], parts: list[str]) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError) as caught:
        read(path)
    for part in parts:
        assert part in str(caught.value)


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(DataError, match="holds no text"):
        read(tmp_path)
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: a pipe or a device"):
        read(tmp_path / "a.jsonl")


def test_embedded_is_the_standard_library() -> None:
    source = open_source(DataConfig())
    found = {"/".join(file.parts[-2:]): file for file in source.files}
    assert source.files == sorted(source.files)
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in source.files)
    few = dataclasses.replace(source, files=[found["json/decoder.py"], found["pydoc_data/topics.py"]])
    module, *topics = few.documents()
    assert "class JSONDecoder" in module
    assert sum(text.startswith("The ") for text in topics) > 20  # of help()
