"""Reads the documents of one local file: text, jsonl or parquet, plain or compressed.

A faulty file raises a `DataError` with the place of the fault, an unreadable file a `FetchError`. Nothing is skipped.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ngpt_train.core.errors import DataError
from ngpt_train.data.sources.source import FetchError, extension

COMPRESSIONS = (".gz", ".zst")
# Most bytes of a line, a row or a compressed text: a few KB on a disk may decompress to more than all memory.
LARGEST_DOCUMENT = 1 << 28
LARGEST_TXT = 1 << 32  # bytes of a plain .txt, which memory holds twice
MOST_EMPTY = 1 << 24  # bytes of consecutive empty lines, which take seconds; nobody writes more into a text
ZSTD_INPUT = 1 << 12  # bytes that are decompressed at a time, to at most 32,768 times as many


def read_file(path: Path, text_field: str, part: tuple[int, int] | None = None) -> Iterator[str]:
    """Yields the documents of one file in order. A .txt file is one document. Of two fields a file that ends in the
    name of the first is the first of two aligned ones.

    part: see `Shard.part`; a compressed jsonl file has no parts.
    Raises FetchError if the file cannot be read, DataError if it is damaged, is not UTF-8 or lacks `text_field`.
    """
    first, *others = text_field.split(",")
    if len(others) == 1 and path.name.endswith(f".{first}"):
        yield from _read_aligned(path, text_field)
        return
    if others and extension(path).startswith(".txt"):
        raise DataError(f"{path}: a text file has no fields {text_field}; use jsonl, tsv or parquet, or aligned files")
    kind = extension(path).split(".")[1]
    try:
        if kind == "parquet":
            yield from _read_parquet(path, text_field, part)
        else:
            with _open(path) as file:
                if kind == "tsv":
                    yield from _read_tsv(path, file, text_field)
                else:
                    yield from _read_txt(path, file) if kind == "txt" else _read_jsonl(path, file, text_field, part)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or incomplete ({error}); copy or download it again") from None
    except OSError as error:
        if error.errno is None:  # pyarrow's error for damaged pages
            raise DataError(f"{path}: damaged or incomplete ({error}); copy or download it again") from None
        raise FetchError(f"{path}: cannot be read ({error.strerror})") from None


def _open(path: Path) -> BinaryIO:
    if path.suffix.lower() in COMPRESSIONS and path.stat().st_size == 0:
        raise EOFError("it has no bytes")  # both formats read no text from it, but a failed copy leaves such a file
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.name.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdFile(path), 1 << 20)
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of a .zst file. The package's own reader takes a truncated file for a short file."""

    def __init__(self, path: Path):
        import zstandard

        # Large corpora are often packed with `zstd --long=31`, whose window the default limit refuses.
        self._new_frame = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._error = zstandard.ZstdError
        self._file = path.open("rb")
        self._frame = self._new_frame()
        self._in_frame = False
        self._input = b""
        self._output = memoryview(b"")  # a view, so that parts are taken without a copy

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._output:
            self._input = self._input or self._file.read(ZSTD_INPUT)
            if not self._input:
                if self._in_frame:
                    raise EOFError("the compressed data ends early")
                return 0
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as error:
                raise EOFError(str(error)) from None
            self._in_frame = not self._frame.eof
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = self._new_frame()
        n = min(len(buffer), len(self._output))
        buffer[:n] = self._output[:n]
        self._output = self._output[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_txt(path: Path, file: BinaryIO) -> Iterator[str]:
    largest = LARGEST_DOCUMENT if path.suffix.lower() in COMPRESSIONS else LARGEST_TXT
    data = file.read(largest + 1) if path.stat().st_size <= largest else b""
    if max(len(data), path.stat().st_size) > largest:
        raise DataError(_too_large(str(path), largest))
    try:
        # utf-8-sig, because a byte order mark at the start of a file is no text.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(_not_utf8(f"{path}, line {line}", data, error)) from None
    del data  # as large as the text
    yield text


def _read_jsonl(path: Path, file: BinaryIO, text_field: str, part: tuple[int, int] | None) -> Iterator[str]:
    start, end = part or (0, None)
    position = start
    if start > 0:
        file.seek(start - 1)
        rest = file.readline(LARGEST_DOCUMENT + 1)  # the rest of the last line of the part before
        if len(rest) > LARGEST_DOCUMENT:
            raise DataError(_too_large(f"{path}, line {_line_number(path, start)}", LARGEST_DOCUMENT))
        position += len(rest) - 1

    def where() -> str:
        return f"{path}, line {_line_number(path, start) + number}"

    empty = 0  # bytes of empty lines since the last document
    for number, line in enumerate(iter(partial(file.readline, LARGEST_DOCUMENT + 1), b""), 1):
        if len(line) > LARGEST_DOCUMENT:
            raise DataError(_too_large(where(), LARGEST_DOCUMENT))
        if end is not None and position >= end:
            return
        position += len(line)
        if not line.strip():
            empty += len(line)
            if empty > MOST_EMPTY:
                raise DataError(f"{where()}: more than {MOST_EMPTY >> 20} MB of empty lines; is the file damaged?")
            continue
        empty = 0
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 and start == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(_not_utf8(where(), line, error)) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where()}: not JSON ({error}); a .jsonl file holds one JSON object a line") from None
        if not isinstance(record, dict):
            raise DataError(
                f"{where()}: a JSON {type(record).__name__}; expected an object with the field {text_field!r}"
            )
        yield document_of(record, where, "field", text_field)


def _read_tsv(path: Path, file: BinaryIO, text_field: str) -> Iterator[str]:
    """Columns between tabs, without quotes. A field is the name of a column in the first line, or its number from 1."""
    header: list[str] | None = None if all(name.isdigit() for name in text_field.split(",")) else []
    for number, line in enumerate(iter(partial(file.readline, LARGEST_DOCUMENT + 1), b""), 1):
        where = partial("{}, line {}".format, path, number)
        if len(line) > LARGEST_DOCUMENT:
            raise DataError(_too_large(where(), LARGEST_DOCUMENT))
        try:
            values = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            raise DataError(_not_utf8(where(), line, error)) from None
        if header == []:
            header = values
            for name in text_field.split(","):
                if name not in header:
                    raise DataError(f"{where()}: {no_field('column', name, header)}")
            continue
        names = header or [str(column) for column in range(1, len(values) + 1)]
        if len(values) < len(names):
            raise DataError(f"{where()}: {len(values)} columns, the first line has {len(names)}; correct the file")
        yield document_of(dict(zip(names, values, strict=False)), where, "column", text_field)


def _read_aligned(path: Path, text_field: str) -> Iterator[str]:
    """Pairs from two files, such as train.de and train.en for the text_field de,en. Their lines k belong together.
    Raises DataError if one has more lines than the other."""
    first, second = text_field.split(",")
    other = path.with_name(f"{path.name.removesuffix(first)}{second}")
    lines = [_lines_of(file) for file in (path, other)]
    if len(lines[0]) != len(lines[1]):
        raise DataError(
            f"{path} has {len(lines[0]):,} lines and {other} has {len(lines[1]):,} lines; line k of one is the "
            "translation of line k of the other, so correct the files"
        )
    yield from map(json.dumps, zip(*lines, strict=True))


def _lines_of(path: Path) -> list[str]:
    """Lines end with a line feed alone, as tools for aligned text count them."""
    try:
        with path.open("rb") as file:
            text = next(_read_txt(path, file))
    except OSError as error:
        raise FetchError(f"{path}: cannot be read ({error.strerror})") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _line_number(path: Path, start: int) -> int:
    """Counts the lines that begin before byte `start`, for a message."""
    if start == 0:
        return 0
    lines = 1
    with path.open("rb") as file:
        while (left := start - 1 - file.tell()) > 0:
            lines += file.read(min(left, 1 << 24)).count(b"\n")
    return lines


def _read_parquet(path: Path, text_field: str, part: tuple[int, int] | None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            names = list(dict.fromkeys(x if x in found else x.partition(".")[0] for x in text_field.split(",")))
            for name in set(names) - set(found):
                raise DataError(f"{path}: {no_field('column', name, found)}")
            first, end = part or (0, file.num_row_groups)
            number = sum(file.metadata.row_group(group).num_rows for group in range(first))
            _check_rows(path, file.metadata, text_field)

            def where() -> str:
                return f"{path}, row {number}"

            for batch in file.iter_batches(256, row_groups=range(first, end), columns=names):
                for values in zip(*(batch.column(name) for name in names), strict=True):
                    number += 1
                    try:
                        record = {name: value.as_py() for name, value in zip(names, values, strict=True)}
                    except UnicodeDecodeError as error:
                        raise DataError(_not_utf8(where(), error.object, error)) from None
                    yield document_of(record, where, "column", text_field)
    except pa.ArrowException as error:
        raise DataError(f"{path}: damaged, incomplete or no parquet file ({error})") from None


def _too_large(where: str, largest: int) -> str:
    unit = f"{largest >> 20:,} MB"
    return f"{where}: a document of more than {unit}, the most that is read at once; cut it into several"


def _check_rows(path: Path, footer: Any, text_field: str) -> None:
    """Raises DataError if the rows of a row group have more than LARGEST_DOCUMENT bytes on average."""
    for group in range(footer.num_row_groups):
        columns = map(footer.row_group(group).column, range(footer.num_columns))
        n_bytes = sum(c.total_uncompressed_size for c in columns if c.path_in_schema in text_field.split(","))
        if n_bytes > LARGEST_DOCUMENT * max(1, footer.row_group(group).num_rows):
            raise DataError(_too_large(f"{path}, row group {group}", LARGEST_DOCUMENT))


def document_of(record: dict[str, Any], where: Callable[[], str], word: str, text_field: str) -> str:
    """The text of a record, or for several fields, with commas between their names, a JSON list: texts and then a label
    of any kind. word: "field" or "column". Raises DataError."""
    names = text_field.split(",")
    values = [_value_of(record, name) for name in names]
    for name, value in zip(names, values, strict=True):
        if value is _MISSING:
            raise DataError(f"{where()}: {no_field(word, name, list(_names(record)))}")
    if len(names) == 1:
        return checked_text(values[0], where, names[0])
    texts = [checked_text(value, where, name) for value, name in zip(values[:-1], names, strict=False)]

    def refuse(value: object) -> NoReturn:
        raise DataError(f"{where()}: {names[-1]!r} holds {type(value).__name__}, expected text or a number")

    return json.dumps([*texts, values[-1]], default=refuse)


_MISSING = object()


def _value_of(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field; translation.de is the field de of the field translation. _MISSING if there is none."""
    if name in record:
        return record[name]
    outer, dot, inner = name.partition(".")
    return _value_of(record[outer], inner) if dot and isinstance(record.get(outer), dict) else _MISSING


def _names(record: Mapping[str, Any]) -> Iterator[str]:
    """The names that `_value_of` takes."""
    for name, value in record.items():
        yield from (f"{name}.{inner}" for inner in _names(value)) if isinstance(value, dict) and value else (name,)


def checked_text(value: object, where: Callable[[], str], text_field: str) -> str:
    """`value`, if it is text that can be stored. Else raises DataError with a message that begins with `where()`."""
    if not isinstance(value, str):
        raise DataError(
            f"{where()}: {text_field!r} holds {type(value).__name__}, expected a string; "
            "choose another data.text_field or correct the file"
        )
    try:
        value.encode()  # JSON can hold half of a surrogate pair, which is no character
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where()}: {text_field!r} holds an unpaired surrogate (\\u{ord(value[error.start]):04x} at character "
            f"{error.start}), which no encoding can store; correct the file"
        ) from None
    return value


def no_field(word: str, text_field: str, names: list[str]) -> str:
    """A part of the message about text without data.text_field. word: "field" or "column"."""
    listed = ", ".join(map(repr, names)) or "none"
    return f"no {word} {text_field!r} (there are: {listed}); set data.text_field to the {word} that holds the text"


def _not_utf8(where: str, data: bytes, error: UnicodeDecodeError) -> str:
    return f"{where}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}); convert the file to UTF-8"
