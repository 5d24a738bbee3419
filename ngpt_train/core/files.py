"""Writes files atomically: a reader finds the old content or the new content, never a part of either. Reads files that
others may have forged: within bounds of size, nesting and memory, and without waiting. Locks directories."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
from collections.abc import Container, Iterable, Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.secrets import redacted

# What JSON may be: far above anything that this program writes, and read in seconds with less than 1 GB of memory.
MOST_BYTES = 1 << 27
MOST_VALUES = 2_000_000
MOST_LINE_BYTES = 1 << 20
MOST_LINES_BYTES = 1 << 32  # of a file of many lines, which is read one after the other
MOST_DAMAGED_LINES = 10_000
# What YAML may be, which people write: aliases count as what they stand for.
MOST_YAML_BYTES = 1 << 20
MOST_YAML_VALUES = 20_000
MOST_YAML_DEPTH = 50


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the content of `path`. After a kill or a power cut, `path` has either the old or the new content. A
    device or a pipe, such as /dev/stdout, is written to: root could replace it by a file. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    partial = path.with_name(f".{path.name}.partial")
    # A link there would lead elsewhere, and a pipe would wait for a reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(partial, flags, 0o666)
    try:
        with open(handle, "wb") as file:  # whose end writes again what could not be written
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # the system does not say of which file
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until the operating system has written the file or directory to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Deletes a directory with all that is in it, a file, or a link, but not what that leads to. Raises OSError.
    shutil.rmtree alone would wait for a pipe, for ever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_json(path: Path, content: Any, indent: int | None = 2) -> None:
    """Writes `content` to `path` as JSON, secrets redacted, atomically (see `write_atomically`). indent: None for one
    line, since with indents each number of a long list has its own line."""
    write_atomically(path, (json.dumps(redacted(content), indent=indent) + "\n").encode())


def open_file(path: Path, most: int) -> BufferedReader:
    """Opens a file of at most `most` bytes that others may have put there. Raises OSError, also where it is no file (a
    pipe would be waited for, a device may have no end) or is larger."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    problem = f"it has more than {most >> 20} MB" if status.st_size > most else ""
    if problem := problem if stat.S_ISREG(status.st_mode) else "it is no file":
        os.close(handle)
        raise OSError(0, problem, str(path))
    return open(handle, "rb")


def read_whole(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file of at most `most` bytes. Raises OSError as `open_file`."""
    with open_file(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(0, f"it has more than {most >> 20} MB", str(path))
    return content


def check_kinds(paths: Iterable[Path], directories: Container[str]) -> None:
    """Raises DataError where one of the paths is there and is no file, or, if its name is among `directories`, no
    directory: a write would go through a link to where it leads, and a pipe would be waited for."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = path.lstat().st_mode
            kind = "directory" if path.name in directories else "file"
            if not (stat.S_ISDIR(mode) if kind == "directory" else stat.S_ISREG(mode)):
                what = f"a link to {path.readlink()}" if stat.S_ISLNK(mode) else "something else"
                raise DataError(f"{path} has to be a {kind}, and is {what}")


def parse_json(content: bytes, most: int = MOST_VALUES) -> Any:
    """The value of a text in JSON. Raises ValueError for anything else, for more than `most` values, for nesting
    without end and for an object with the same name twice. A whole number that no float can hold is infinite."""
    if content.count(b",") + content.count(b"[") + content.count(b"{") > most:
        raise ValueError(f"more than {most:,} values")
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_object, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("nested without end") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _whole_number(text: str) -> int | float:
    return int(text) if len(text) <= 300 else float(text)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises DataError where `path` cannot be read or is not JSON."""
    try:
        return parse_json(read_whole(path))
    except OSError as error:
        raise DataError(f"{path} is missing or damaged: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is missing or damaged: {error}") from None


def json_lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """The lines of a file of JSON objects, each with its object: None for one that is cut, damaged or larger than
    MOST_LINE_BYTES. Raises DataError where the file cannot be read, or is no such file."""
    damaged = 0
    try:
        with open_file(path, MOST_LINES_BYTES) as file:
            for line in iter(partial(file.readline, MOST_LINE_BYTES), b""):
                record = None
                if line.endswith(b"\n"):
                    with contextlib.suppress(ValueError):
                        record = parse_json(line)
                record = record if isinstance(record, dict) else None
                damaged += record is None
                if damaged > MOST_DAMAGED_LINES:
                    raise OSError(0, f"more than {MOST_DAMAGED_LINES:,} of its lines are no JSON objects")
                yield line, record
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Restore it, or leave it out.") from None


def read_yaml_text(path: Path) -> str:
    """The text of a YAML file of few values and levels, those that aliases stand for included. Raises OSError,
    ValueError or yaml.YAMLError."""
    import yaml
    from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

    text = read_whole(path, MOST_YAML_BYTES).decode("utf-8")
    values = 0
    values_of: dict[str | None, int] = {}  # by anchor
    open_nodes: list[tuple[str | None, int]] = []  # the anchor, and the values before it
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, CollectionEndEvent):
            anchor, before = open_nodes.pop()
            values_of[anchor] = values - before
        elif isinstance(event, AliasEvent):
            values += values_of.get(event.anchor, 1)
        elif isinstance(event, NodeEvent):
            values_of[event.anchor] = 1
            if isinstance(event, CollectionStartEvent):
                open_nodes.append((event.anchor, values))
                values_of[event.anchor] = MOST_YAML_VALUES  # an alias inside of it has no end
            values += 1
        if values > MOST_YAML_VALUES or len(open_nodes) > MOST_YAML_DEPTH:
            raise ValueError(f"more than {MOST_YAML_VALUES:,} values or {MOST_YAML_DEPTH} levels, aliases resolved")
    return text


def yaml_tree(path: Path) -> Any:
    """The content of a YAML file, by libyaml where PyYAML has it, five times as fast. Raises as `read_yaml_text`."""
    import yaml

    return yaml.load(read_yaml_text(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def text_of(path: Path) -> str:
    """The text of a small file of the system, such as in /proc, stripped; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class DirectoryLock:
    """The file `lock`, by which one process at a time uses `directory`. The kernel drops it when the process ends."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._file: IO[str] | None = None

    def create(self) -> None:
        """Makes the file, if there is none. Raises OSError."""
        self._file = self._path.open("a")

    def take(self) -> None:
        """Takes the lock and writes who holds it into its file, for those who are refused. After `create`. Raises
        BlockingIOError if another process holds it, OSError where the file system has no locks."""
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            self._sign()
            raise
        self._sign()

    def is_taken(self) -> bool:
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)) as file:  # a pipe would be waited for
                # A shared lock, so that ranks that look at the same time do not refuse each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:  # no file; or no locks on this file system, as `take` says
            return isinstance(error, BlockingIOError)
        return False

    def holder(self) -> str:
        """Who holds the lock, in words."""
        try:
            return read_whole(self._path, 1 << 10).decode().strip() or "a running process"
        except (OSError, ValueError):
            return "a running process"

    def release(self) -> None:
        """Drops the lock, if this process has it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
            self._file.close()

    def _sign(self) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
