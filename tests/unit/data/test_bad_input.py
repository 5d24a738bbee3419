"""Bad input, for text that is prepared and text that is streamed: a clear error or a counted skip, and nothing lost.

Elsewhere: faults of a single file (test_data_readers.py), of prepared shards and other token files
(test_data_prepare.py, test_data_megatron.py), of the hub (test_hub.py), and kills (test_data_prepare_resume.py,
processes/test_streaming.py).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data import open_dataset, reader_of, shard_cache
from ngpt_train.data.loader import Reader
from ngpt_train.data.shard_cache import HEADER, Documents, ShardCache, read_header
from ngpt_train.data.sources.local_files import LocalText, list_files
from ngpt_train.data.sources.source import FetchError, Shard
from ngpt_train.data.workers import StreamReader

ROOT = Path(__file__).parents[3]
ROWS = 96
EPOCH = 1000  # more rows than one has
WAYS = ("prepared", "streamed")


def texts(n: int = 60, start: int = 0) -> list[str]:
    return [f"{i}: " + f"word{i * 7919 % 1000} " * (5 + i % 30) for i in range(start, start + n)]


def lines(documents: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=10)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Three good files."""
    directory = tmp_path / "text"
    directory.mkdir()
    (directory / "a.jsonl").write_bytes(lines(texts()))
    write_parquet(directory / "b.parquet", {"text": texts(40, 100)})
    (directory / "d.jsonl").write_bytes(lines(texts(50, 200)))
    return directory


def config(text: Path | str, cache: Path, way: str = "streamed", **data: Any) -> Config:
    found = Config()
    found.data = dataclasses.replace(
        found.data, kind="local", path=str(text), cache=str(cache), streaming=way == "streamed", streams=8,
        open_shards=2, workers=0, prepare_workers=1, val_fraction=0.1,
    )  # fmt: skip
    found.data = dataclasses.replace(found.data, **data)
    found.tokenizer.kind, found.model.context, found.eval.rows = "bytes", 31, 2
    return found


def rows(cfg: Config, n: int = ROWS) -> tuple[NDArray[np.int64], dict[str, str]]:
    """The first rows of training, and the skipped shards."""
    reader = reader_of(open_dataset(cfg), cfg)
    try:
        taken = [np.stack(reader.take(np.arange(first, first + 8))[:2], 1) for first in range(0, n, 8)]
        return np.concatenate(taken), dict(reader.state().skipped)
    finally:
        reader.close()


def take_all(reader: Reader, first: int) -> None:
    """Rows until something is wrong."""
    for row in range(first, 10**6, 8):
        reader.take(np.arange(row, row + 8))


def left(directory: Path) -> list[str]:
    """The files of a cache, without its checksums."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.name != "hashes.json")


# --- text


def truncated(path: Path) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    return path


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda text: truncated(write_parquet(text / "c.parquet", {"text": texts(300)})),
        r"c\.parquet: damaged, incomplete or no parquet file",
    ),
    "cut line": (
        lambda text: (text / "c.jsonl").write_bytes(lines(texts(20))[:-9]),
        r"c\.jsonl, line 20: not JSON",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_faulty_files_end_the_run(text: Path, tmp_path: Path, way: str) -> None:
    """Caught: a traceback in place of the file and its row; documents before the fault that pass for all of them."""
    make, message = FAULTS["cut line"]
    make(text)
    for _ in range(2):  # the files of the first try do not hide the fault from the second
        with pytest.raises(DataError, match=message):
            rows(config(text, tmp_path / "cache", way, open_shards=4))
    good = 3 if way == "streamed" else 0
    assert len(list((tmp_path / "cache").glob("*/*/*"))) <= good * 4
    assert not list((tmp_path / "cache").glob("*/.*"))


@pytest.mark.parametrize(("fault", "workers"), [("truncated", 0), ("cut line", 1)])
def test_skip_leaves_out_the_whole_shard_and_nothing_else(text: Path, tmp_path: Path, fault: str, workers: int) -> None:
    """Caught: documents before the fault that are trained on; a shard too many; a skip that nobody hears of."""
    make, message = FAULTS[fault]
    make(text)
    (bad,) = text.glob("c.*")
    cfg = config(text, tmp_path / "cache", on_bad_shard="skip", workers=workers)
    found, skipped = rows(cfg, EPOCH)
    assert list(skipped) == [bad.name]
    assert re.search(message, skipped[bad.name])
    headers = [json.loads(path.read_text()) for path in (tmp_path / "cache" / "documents").glob("*/header.json")]
    assert [header["bad"] for header in headers if header["bad"] is not None] == [skipped[bad.name]]
    assert sum(header["documents"] for header in headers) == 150

    bad.unlink()
    write_parquet(text / "c.parquet", {"text": pa.array([], pa.string())})
    expected, nothing = rows(config(text, tmp_path / "cache"), EPOCH)
    assert nothing == {}
    np.testing.assert_array_equal(found, expected)


def test_a_skip_is_no_licence_for_later(text: Path, tmp_path: Path) -> None:
    """Caught: the empty copy that a skip left in the cache, taken for the shard by a run that does not skip."""
    FAULTS["truncated"][0](text)
    assert rows(config(text, tmp_path / "cache", on_bad_shard="skip"), EPOCH)[1]
    with pytest.raises(DataError, match=r"c\.parquet: damaged"):
        rows(config(text, tmp_path / "cache"), EPOCH)


def test_nothing_but_faulty_shards(tmp_path: Path) -> None:
    """Caught: advice to add text, where there is some that was left out."""
    (tmp_path / "text").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "text" / name).write_bytes(b"{")
    with pytest.raises(DataError, match=r"left out as faulty.*a\.jsonl, line 1: not JSON"):
        open_dataset(config(tmp_path / "text", tmp_path / "cache", on_bad_shard="skip"))


@pytest.mark.parametrize("way", WAYS)
def test_files_without_text_are_read_and_counted(text: Path, tmp_path: Path, way: str) -> None:
    """Caught: a division or a map of nothing; an empty document that becomes a row, or is not counted."""
    expected = rows(config(text, tmp_path / "cache", way))[0] if way == "prepared" else None
    write_parquet(text / "e.parquet", {"text": pa.array([], pa.string())})
    pq.ParquetWriter(text / "f.parquet", pa.schema([("text", pa.string())])).close()  # not even a row group
    (text / "g.jsonl").write_bytes(b"")
    (text / "h.txt").write_bytes(b"")
    (text / "i.jsonl").write_bytes(lines(["", ""]) + b"\n")
    write_parquet(text / "j.parquet", {"text": ["", "", ""]})
    cfg = config(text, tmp_path / "cache", way)
    data = open_dataset(cfg)
    found, skipped = rows(cfg, EPOCH)  # of more than an epoch
    assert skipped == {}
    if way == "prepared":
        source = data.manifest["source"]
        assert (source["documents"], source["skipped_empty"]) == (150, 6)
        np.testing.assert_array_equal(found[:ROWS], expected)
    else:
        headers = [read_header(path.parent) for path in (tmp_path / "cache" / "documents").glob("*/header.json")]
        assert (sum(h["documents"] for h in headers), sum(h["empty"] for h in headers)) == (150, 6)


def test_directories_that_are_linked_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Caught: a part of the text that is missing without a word, or there twice; an endless search."""
    text, elsewhere = tmp_path / "text", tmp_path / "elsewhere"
    text.mkdir()
    (elsewhere / "deeper").mkdir(parents=True)
    (elsewhere / "deeper" / "b.txt").write_text("b")
    (text / "a.txt").write_text("a")
    (text / "linked").symlink_to(elsewhere)
    (elsewhere / "deeper" / "up").symlink_to(elsewhere)
    (text / "itself").symlink_to(".")
    assert list_files(str(text)) == [text / "a.txt", text / "linked" / "deeper" / "b.txt"]
    # Two that point at each other, a link that sorts before its target, a file under two names.
    for name, other in (("v1", "v2"), ("v2", "v1")):
        (text / name).mkdir()
        (text / name / "c.txt").write_text(name)
        (text / name / "other").symlink_to(text / other)
    (text / "latest").symlink_to("v1")
    (text / "Again.txt").symlink_to("a.txt")
    names = ["a.txt", "linked/deeper/b.txt", "v1/c.txt", "v2/c.txt"]
    assert [str(file.relative_to(text)) for file in list_files(str(text))] == names
    assert "1 links to files that are read anyway are left out, such as" in caplog.text
    os.mkfifo(text / "pipe.jsonl")
    assert len(list_files(str(text))) == 4
    assert "1 other files are not read, such as" in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_paths_that_lead_nowhere(text: Path, tmp_path: Path, way: str) -> None:
    """Caught: a link to nothing that is passed over, so that a part of the text is missing without a word."""
    with pytest.raises(DataError, match=r"data\.path=.*none\*\.jsonl: no such file or directory, and no file matches"):
        open_dataset(config(tmp_path / "none*.jsonl", tmp_path / "cache", way))
    (text / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for path in (text, f"{text}/*.jsonl"):
        with pytest.raises(DataError, match=r"link\.jsonl: cannot be read \(No such file or directory\)"):
            open_dataset(config(path, tmp_path / "cache", way))
    (text / "link.jsonl").unlink()
    (text / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(DataError, match=r"loop\.jsonl: cannot be read \(Too many levels of symbolic links\)"):
        open_dataset(config(text, tmp_path / "cache", way))
    assert not (tmp_path / "cache").exists()


def test_a_file_that_cannot_be_read_is_not_a_faulty_one(text: Path, tmp_path: Path) -> None:
    """Caught: a disk or a mount that is away for a moment, and shards that the cache then skips for ever."""
    cfg = config(text, tmp_path / "cache", on_bad_shard="skip")
    data = open_dataset(cfg)
    (text / "d.jsonl").rename(tmp_path / "away")
    with pytest.raises(FetchError, match=r"d\.jsonl: cannot be read \(No such file"):
        take_all(reader_of(data, cfg), 0)
    (tmp_path / "away").rename(text / "d.jsonl")
    assert rows(cfg, EPOCH)[1] == {}


def test_text_that_changes_while_it_is_streamed(text: Path, tmp_path: Path) -> None:
    """Caught: a decoded copy of the new text under the identity of the old one, for this run and for later ones."""
    expected = rows(config(text, tmp_path / "clean", open_shards=1))[0]
    cfg = config(text, tmp_path / "cache", open_shards=1)
    originals = {path: path.read_bytes() for path in text.iterdir()}
    dataset = open_dataset(cfg)  # decodes one of the files, for validation
    decoded = set((tmp_path / "cache/documents").iterdir())
    for path, content in originals.items():
        path.write_bytes(content[::-1] if path.suffix == ".parquet" else content.swapcase().replace(b"TEXT", b"text"))
    with pytest.raises(FetchError, match=r"\.(jsonl|parquet): its text has changed since the run has listed it"):
        reader_of(dataset, cfg)
    assert len(decoded) < len(originals), "all were decoded before they changed"
    assert set((tmp_path / "cache/documents").iterdir()) - decoded <= {tmp_path / "cache/documents/hashes.json"}
    for path, content in originals.items():
        path.write_bytes(content)
    assert np.array_equal(rows(cfg)[0], expected)


def test_text_that_changes_while_it_is_decoded(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a file that is another one while it is read, and again the old one when it is compared."""
    cfg = config(text, tmp_path / "cache")
    path, read = text / "a.jsonl", LocalText.documents
    original = path.read_bytes()

    def swapped(self: LocalText, shard: Shard, scratch: Path) -> Iterator[str]:
        path.write_bytes(lines(texts(30, 500)))
        found = list(read(self, shard, scratch))
        path.write_bytes(original)
        return iter(found)

    monkeypatch.setattr(LocalText, "documents", swapped)
    with pytest.raises(FetchError, match="its text has changed"):
        rows(cfg)
    monkeypatch.undo()
    assert np.array_equal(rows(cfg)[0], rows(config(text, tmp_path / "clean"))[0])


def test_copies_of_earlier_versions_are_made_again(text: Path, tmp_path: Path) -> None:
    """They may be of text that had changed while it was streamed."""
    cfg = config(text, tmp_path / "cache")
    expected = rows(cfg)[0]
    headers = sorted((tmp_path / "cache/documents").glob(f"*/{HEADER}"))
    assert headers
    for path in headers:
        header = json.loads(path.read_text())
        del header["files"]
        path.write_text(json.dumps(header))
    assert np.array_equal(rows(cfg)[0], expected)
    assert all("files" in json.loads(path.read_text()) for path in headers)


def test_changed_text_or_tokenizer_is_other_data(text: Path, tmp_path: Path) -> None:
    """The fingerprint of streamed text changes, which refuses a resume (processes/test_refusals.py)."""

    def fingerprint(**tokenizer: Any) -> str:
        cfg = config(text, tmp_path / "cache")
        cfg.tokenizer = dataclasses.replace(cfg.tokenizer, **tokenizer)
        return open_dataset(cfg).fingerprint

    before = fingerprint()
    assert fingerprint(kind="sentencepiece", vocab_size=300) != before
    (text / "d.jsonl").write_bytes(lines([*texts(49, 200), "x" * len(texts(1, 249)[0])]))
    assert fingerprint() != before


# --- data workers


def test_a_killed_worker_is_noticed(text: Path, tmp_path: Path) -> None:
    """kill -9 within a block that is larger than a pipe. Caught: a trainer that waits for its rest for ever."""
    cfg = config(text, tmp_path / "cache", workers=1, prefetch=2)
    data = open_dataset(cfg)
    reader = reader_of(data, cfg)
    assert isinstance(reader, StreamReader)
    for first in range(0, 2400, 8):
        reader.take(np.arange(first, first + 8))
    process = reader._workers[0]._process
    time.sleep(0.5)  # until the pipe is full
    process.kill()
    start = time.monotonic()
    with pytest.raises(DataError, match=r"data worker ended without a word \(exit code -9.*run the same command again"):
        take_all(reader, 2400)
    assert time.monotonic() - start < 10
    reader.close()


def test_a_block_that_cannot_be_read(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a trainer that waits for ever, because the thread that reads blocks has ended."""

    def get(self: object) -> object:
        raise MemoryError("of a block")

    monkeypatch.setattr(multiprocessing.queues.Queue, "get", get)
    cfg = config(text, tmp_path / "cache", workers=1)
    reader = reader_of(open_dataset(cfg), cfg)
    with pytest.raises(MemoryError, match="of a block"):
        reader.take(np.arange(8))
    reader.close()


UNCLOSED = """
import sys
import numpy as np
from pathlib import Path
from ngpt_train.data import open_dataset, reader_of
from tests.unit.data.test_bad_input import config
if __name__ == "__main__":
    cfg = config(sys.argv[1], Path(sys.argv[2]), workers=1)
    reader = reader_of(open_dataset(cfg), cfg)
    reader.take(np.arange(8))
    print(reader._workers[0]._process.pid, flush=True)
    raise SystemExit(7)
"""


def test_a_trainer_that_does_not_close_its_workers_ends(text: Path, tmp_path: Path) -> None:
    """Caught: an exit that waits for workers which ignore SIGTERM."""
    finished = run_script(tmp_path / "unclosed.py", UNCLOSED, text, tmp_path / "cache")
    assert finished.returncode == 7, finished.stderr
    assert not Path(f"/proc/{finished.stdout.strip()}").exists()


# --- the cache of decoded shards


@dataclasses.dataclass(frozen=True)
class Made:
    """Makes the documents of a shard by its name, and writes down which were asked for."""

    log: Path
    n: int = 30
    wait: float = 0.0
    killed: bool = False
    full: int = 0  # of so many first attempts

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        with self.log.open("a") as file:
            file.write(f"{shard.name}\n")
        for i in range(self.n):
            yield f"{shard.name} {i} " + "x" * 100
        if len(self.asked()) <= self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(self.wait)
        if self.killed:
            os.kill(os.getpid(), signal.SIGKILL)

    def asked(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


def shard(name: str) -> Shard:
    return Shard(name, f"identity of {name}", ())


def cache_of(tmp_path: Path, source: Made | None = None, limit: float = 1e9, skip_bad: bool = False) -> ShardCache:
    return ShardCache(tmp_path / "cache", limit, source or Made(tmp_path / "log"), "text", skip_bad)


def content(documents: Documents) -> list[str]:
    return [documents.text(i) for i in range(len(documents))]


def flipped(name: str) -> Callable[[Path], object]:
    def flip(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[len(data) // 2] ^= 1
        (directory / name).write_bytes(data)

    return flip


def header(data: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / HEADER).write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: truncated(directory / "text.bin"),
        lambda directory: (directory / "text.bin").unlink(),
        lambda directory: (directory / HEADER).unlink(),
        *map(flipped, ("text.bin", "ends.bin", "places.bin")),
        *map(header, (b"{", b"null", b"{}", b'{"documents": "x", "bytes": 3, "bad": null}')),
        lambda d: header(json.dumps(read_header(d) | {"sha256": "0"}).encode())(d),
    ],
)
def test_a_damaged_copy_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    """Caught: other rows, or another split, out of a copy with a wrong byte; a traceback for a damaged header."""
    source = Made(tmp_path / "log")
    cache = cache_of(tmp_path, source)
    expected = cache.open(shard("a"))
    places = expected.places[:].tolist()
    texts = content(expected)
    damage(next((tmp_path / "cache").glob("*/")))
    again = cache.open(shard("a"))
    assert (content(again), again.places[:].tolist()) == (texts, places)
    assert source.asked() == ["a", "a"]
    assert "is damaged" in caplog.text
    assert content(cache.open(shard("a"))) == texts
    assert len(source.asked()) == 2


def test_no_directory_in_the_place_of_a_copy(tmp_path: Path) -> None:
    """Caught: a pipe that is waited for; a file that is deleted although only a link leads to it."""
    cache = cache_of(tmp_path)
    for name in "ab":
        cache.open(shard(name))
    linked, pipe = (path.parent for path in (tmp_path / "cache").glob(f"[!.]*/{HEADER}"))
    outside = tmp_path / "outside"
    linked.rename(outside)
    (outside / HEADER).write_text("precious")
    linked.symlink_to(outside)
    pipe.rename(tmp_path / "moved")
    os.mkfifo(pipe)
    assert in_processes(cache, [["a", "b"]]) == [0]
    assert (outside / HEADER).read_text() == "precious"


def test_a_disk_that_damages_everything_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(tmp_path)
    monkeypatch.setattr("ngpt_train.data.cache_files._hash", lambda *_: ["0", -1])
    with pytest.raises(DataError, match=r"a: the decoded copy in .* is damaged again and again; is the disk faulty"):
        cache.open(shard("a"))


def open_in_a_process(cache: ShardCache, names: list[str], together: Any) -> None:
    together.wait()
    for name in names:
        assert len(cache.open(shard(name))) == 30


def in_processes(cache: ShardCache, orders: list[list[str]]) -> list[int | None]:
    """Exit codes of processes that open shards at the same moment."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(len(orders))
    processes = [context.Process(target=open_in_a_process, args=(cache, order, together)) for order in orders]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_a_kill_while_a_shard_is_decoded(tmp_path: Path) -> None:
    """Caught: half a copy that is taken for the whole; half a copy that stays for ever."""
    cache = cache_of(tmp_path, Made(tmp_path / "log", killed=True))
    assert in_processes(cache, [["a"]]) == [-signal.SIGKILL]
    assert not list((tmp_path / "cache").glob(f"[!.]*/{HEADER}"))
    cache = cache_of(tmp_path)
    assert len(cache.open(shard("a"))) == 30
    assert not [name for name in left(tmp_path / "cache") if name.startswith(".")]


def set_age(cache: Path, name: str, seconds: int) -> None:
    """Makes a shard look as if it was opened so long ago."""
    for found in cache.glob(f"[!.]*/{HEADER}"):
        if Documents(found.parent).text(0).startswith(f"{name} "):
            os.utime(found, (time.time() - seconds, time.time() - seconds))


def held(cache: Path) -> list[str]:
    return sorted(Documents(path.parent).text(0)[0] for path in cache.glob(f"[!.]*/{HEADER}"))


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    """Caught: the newest deleted first; one whose rows are read pulled away; a half one of another process deleted."""
    directory = tmp_path / "cache"
    source = Made(tmp_path / "log")
    unbounded = cache_of(tmp_path, source)
    opened = {name: unbounded.open(shard(name)) for name in "abc"}
    size = sum(path.stat().st_size for path in directory.glob("[!.]*/*")) / 3
    for name, seconds in (("a", 100), ("b", 300), ("c", 200)):
        set_age(directory, name, seconds)
    unbounded.open(shard("b"))  # the oldest is now c
    another = directory / ".d.partial-1"
    another.mkdir()
    (another / HEADER).write_text("{}")
    os.utime(another / HEADER, (0, 0))

    bounded = cache_of(tmp_path, source, 2.5 * size)
    last = bounded.open(shard("d"))
    assert held(directory) == ["a", "b", "d"]
    assert content(opened["c"])[-1].startswith("c 29 ")
    assert another.exists()

    for name in "abd":
        set_age(directory, name, 100)
    small = cache_of(tmp_path, source, 1)
    assert content(small.open(shard("e")))[0].startswith("e 0 ")
    small.open(shard("f"))
    assert held(directory) == ["e", "f"], "e may not have been read yet by another process"
    assert content(last)[-1].startswith("d 29 ")
    assert another.exists()
    asked = len(source.asked())
    small.open(shard("e"))
    assert len(source.asked()) == asked, "a shard larger than the cache stays while nothing else is opened"


def test_processes_that_share_a_small_cache(tmp_path: Path) -> None:
    """Caught: shards that others delete as soon as they are made, so that all make them again, or give up; a shard that
    all three decode at the same moment; half a shard that is read."""
    source = Made(tmp_path / "log", wait=0.2)
    cache = cache_of(tmp_path, source, 1)
    assert in_processes(cache, [list("abcd") * 8, list("adcb") * 8, list("abdc") * 8]) == [0, 0, 0]
    assert sorted(source.asked()) == list("abcd")


def test_a_small_cache_gives_the_same_rows(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: rows out of a file that was deleted, or of another shard that took its place."""
    monkeypatch.setattr(shard_cache, "RECENT", -1.0)
    expected, _ = rows(config(text, tmp_path / "large"), EPOCH)
    found, _ = rows(config(text, tmp_path / "small", cache_gb=1e-9), EPOCH)
    np.testing.assert_array_equal(found, expected)
    assert len(held(tmp_path / "small" / "documents")) < 3 == len(held(tmp_path / "large" / "documents"))


# --- a full disk


def test_room_is_made_on_a_full_disk(tmp_path: Path) -> None:
    """The system's own answer ENOSPC. Caught: a run that ends although there are shards that it can make again."""
    source = Made(tmp_path / "log")
    cache_of(tmp_path, source).open(shard("a"))
    full = cache_of(tmp_path, dataclasses.replace(source, full=2))
    assert len(full.open(shard("b"))) == 30
    assert held(tmp_path / "cache") == ["b"]


@dataclasses.dataclass(frozen=True)
class OnFullDisk(Made):
    """Lets one of the files of its copy end on a disk that is full."""

    file: str = "text.bin"

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        (scratch.parent / self.file).symlink_to("/dev/full")
        return super().documents(shard, scratch)


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("file", ["text.bin", "ends.bin", "places.bin", HEADER])
def test_a_full_disk_is_one_error(tmp_path: Path, file: str, skip_bad: bool) -> None:
    """Caught: a shard that is left out as faulty because there was no room for it; anything half-made; numpy's tofile,
    which takes a full disk for success where the file is short."""
    cache = cache_of(tmp_path, OnFullDisk(tmp_path / "log", file=file), skip_bad=skip_bad)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\).*data\.cache"):
        cache.open(shard("a"))
    assert not (tmp_path / "cache").exists()


LIMITED = """
import resource, sys
from pathlib import Path
from ngpt_train.core.errors import DataError
from ngpt_train.data import open_dataset
from ngpt_train.data.sources import local_files
from tests.unit.data.test_bad_input import config
if __name__ == "__main__":
    local_files.UNIT_BYTES = 200_000  # so that there is work for two processes
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        open_dataset(config(sys.argv[1], Path(sys.argv[2]), "prepared", prepare_workers=2))
    except DataError as error:
        print(error)
"""


def run_script(script: Path, code: str, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    script.write_text(code)
    return subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """A quota, and what stands for a full disk without a disk. Caught: a traceback out of a process of `prepare`."""
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.jsonl").write_bytes(lines(texts(3000)))
    finished = run_script(tmp_path / "limited.py", LIMITED, tmp_path / "text", tmp_path / "cache")
    assert re.search(r"cannot be written \(File too large\).*data\.cache", finished.stdout), finished
    assert "Traceback" not in finished.stderr
    assert left(tmp_path / "cache") == []


# --- a long document

LONG = """
import resource, sys
import numpy as np
from pathlib import Path
from ngpt_train.data import open_dataset, reader_of
from tests.unit.data.test_bad_input import config
if __name__ == "__main__":
    way, text, cache = sys.argv[1:]
    cfg = config(text, Path(cache), way, streams=1)
    data = open_dataset(cfg)
    reader = reader_of(data, cfg)
    found = 0
    for first in range(0, 2_000_000, 4096):
        found += int((reader.take(np.arange(first, first + 4096))[1] == ord("~")).sum())
        if found > 10_000:
            break
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, found)
"""
LONG_BYTES = 200_000_000
# Bytes in memory for each byte of the document, with ids of one or two bytes. Streamed: its text, its UTF-8, the ids of
# its stretches and all its ids with eos: 4.9, measured. Prepared: also the ids of a part, and the written bytes: 7.9.
# One copy of ids of eight bytes would add 8.
COPIES = {"prepared": 9, "streamed": 6}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_a_document_of_200_mb(tmp_path: Path, way: str) -> None:
    """Caught: ids of eight bytes, or a copy too many, of a text that is large enough to end a machine."""
    peaks = []
    for n in (1000, LONG_BYTES):
        directory = tmp_path / str(n)
        directory.mkdir()
        with (directory / "a.jsonl").open("wb") as file:  # in pieces: a child's peak begins at the memory of its parent
            file.write(lines(texts()) + b'{"text": "')
            for _ in range(n // 1000):
                file.write(b"~ words " * 125)
            file.write(b'"}\n' + lines(texts(60, 100)))
        finished = run_script(tmp_path / "long.py", LONG, way, directory, tmp_path / "cache")
        peak, found = map(int, finished.stdout.split())
        peaks.append(peak)
        assert found >= 125
    assert peaks[1] - peaks[0] < COPIES[way] * LONG_BYTES, peaks
