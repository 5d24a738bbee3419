"""Units of text, tokenized into chunks by several processes. The chunks come in the order of the text.

Each process tokenizes one unit at a time and writes its chunks into files, so chunks wait on the disk for their turn. A
killed process ends the work with an error. Processes whose parent was killed end by themselves.
"""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from ngpt_train.config.keys import AUTO
from ngpt_train.core.cpus import whole_cpus
from ngpt_train.core.errors import DataError
from ngpt_train.core.launcher import end_with_parent
from ngpt_train.data.sources.source import Counts, Shard, ShardSource, halves, place_of
from ngpt_train.data.tokenizers.tokenizer import Ids, Tokenizer, with_eos

STEMS = {"train": "train", "validation": "val"}  # file names of each split
# A process holds so many characters in memory, or one document.
CHUNK_CHARACTERS = 2_000_000
# Units per process that may be tokenized before their turn, to bound their disk space.
AHEAD = 3
POLL_SECONDS = 0.05
Document = tuple[Ids, int]  # ids with eos at their end, bytes of the text


@dataclass
class Chunk:
    """Documents of a unit, tokenized. It grows to CHUNK_CHARACTERS."""

    taken: int  # documents of the unit up to the end of the chunk, empty ones included
    characters: int = 0
    counts: Counts = field(default_factory=Counts)
    digests: list[bytes] = field(default_factory=list)  # sha256 of the text of each document in `counts`
    documents: dict[str, list[Document]] = field(default_factory=lambda: {split: [] for split in STEMS})


@dataclass(frozen=True)
class Tokenizing:
    """Makes chunks of text. Travels to worker processes."""

    reader: ShardSource
    tokenizer: Tokenizer
    val_fraction: float
    single: bool  # True if the text is one document, whose end validates
    keep_empty: bool  # True if an empty document is an eos, False if it is skipped

    def chunks(self, shard: Shard, skip: int, scratch: Path) -> Iterator[Chunk]:
        """The unit after its first `skip` documents, in one chunk at least. Raises DataError.
        scratch: a directory that is made for the unit's files, and removed at the end."""
        scratch.mkdir()
        chunk = Chunk(skip)
        for number, text in enumerate(self.reader.documents(shard, scratch), 1):
            if number <= skip:
                continue
            chunk.taken = number
            if not text and not self.keep_empty:
                chunk.counts.empty += 1
                continue
            for split, document, n_bytes in self._placed(text, shard.held_out, chunk):
                chunk.documents[split].append((with_eos(self.tokenizer, document), n_bytes))
            chunk.characters += max(1, len(text))
            if chunk.characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk = Chunk(number)
        yield chunk
        shutil.rmtree(scratch)

    def _placed(self, text: str, held_out: bool, chunk: Chunk) -> list[tuple[str, str, int]]:
        """(split, text, bytes) of a document; two parts if the text is a single document. Counts it in `chunk`."""
        data = text.encode()
        place = place_of(data)
        held_out = held_out or place < self.val_fraction
        chunk.counts.add(Counts(1, len(data), 0, int(held_out), place, place))
        chunk.digests.append(hashlib.sha256(data).digest())
        if not self.single:
            return [("validation" if held_out else "train", text, len(data))]
        first, second = halves(text, self.val_fraction)
        held_out_bytes = len(second.encode())
        return [("train", first, len(data) - held_out_bytes), ("validation", second, held_out_bytes)]


def n_processes(setting: int | str, n_units: int) -> int:
    """The number of processes for `data.prepare_workers`, at most one for each unit."""
    return max(1, min(whole_cpus() if setting == AUTO else int(setting), n_units))


def chunks_in_order(
    units: Sequence[Shard], start: tuple[int, int], tokenizing: Tokenizing, processes: int, scratch: Path
) -> Generator[tuple[int, Chunk], None, None]:
    """(unit, chunk) from `start` on, which is a unit and the number of its finished documents. scratch: a directory for
    waiting chunks. Raises the errors of reading, in the order of the text."""
    skips = {start[0]: start[1]}
    with contextlib.ExitStack() as stack:
        if processes > 1:
            pool = _Pool(processes, tokenizing, scratch)
            stack.callback(pool.close)
        for number in range(start[0], len(units)):
            if processes > 1:
                ahead = range(number, min(len(units), number + AHEAD * processes))
                chunks = pool.chunks(number, {n: (units[n], skips.get(n, 0)) for n in ahead})
            else:
                chunks = tokenizing.chunks(units[number], skips.get(number, 0), scratch / f"{number}")
            for chunk in chunks:
                yield number, chunk


class _Pool:
    """Processes that tokenize units, ended at once by `close`."""

    def __init__(self, processes: int, tokenizing: Tokenizing, scratch: Path) -> None:
        # Not forked: a child of a process with threads, or with a GPU, may hang.
        context = multiprocessing.get_context("spawn")
        self._others = set(multiprocessing.active_children())
        self._processes: set[BaseProcess] = set()
        self._pool = ProcessPoolExecutor(processes, context, _begin, (tokenizing, scratch))
        self._scratch = scratch
        self._futures: dict[int, Future[None]] = {}

    def chunks(self, number: int, ahead: dict[int, tuple[Shard, int]]) -> Iterator[Chunk]:
        """The chunks of unit `number`. ahead[unit]: a unit that may be started, and the documents to skip in it."""
        try:
            for unit, (shard, skip) in ahead.items():
                if unit not in self._futures:
                    self._futures[unit] = self._pool.submit(_tokenize, unit, shard, skip)
                    # Noted now, because a process that ends before the next call is no active child any more.
                    self._processes |= set(multiprocessing.active_children()) - self._others
            future = self._futures[number]
            for k in itertools.count():
                path = _place(self._scratch, number, k)
                while not path.exists():
                    if future.done() and not path.exists():
                        return future.result()
                    wait([future], POLL_SECONDS)
                chunk = pickle.loads(path.read_bytes())
                path.unlink()
                yield chunk
        except BrokenProcessPool:
            raise self._died() from None

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def _died(self) -> DataError:
        # Not by join: the pool's thread may be waiting for the same exit code, and only one of the two gets it.
        deadline = time.monotonic() + 10
        while any(process.exitcode is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        ended_by_pool = (0, None, -signal.SIGTERM)
        codes = [process.exitcode for process in self._processes if process.exitcode not in ended_by_pool]
        return DataError(
            f"a process of `prepare` ended without a word (exit code {codes[0] if codes else 'unknown'}; -9 is often a "
            "lack of memory). Run the same command again: it goes on after the last finished shard; fewer "
            "data.prepare_workers need less memory"
        )


def _place(scratch: Path, number: int, k: int) -> Path:
    """The file of chunk `k` of a unit."""
    return scratch / f"{number}-{k}.chunk"


_tokenizing: Tokenizing
_scratch: Path


def _begin(tokenizing: Tokenizing, scratch: Path) -> None:
    """Runs in a process of the pool before its first unit."""
    global _tokenizing, _scratch
    _tokenizing, _scratch = tokenizing, scratch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends its processes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    end_with_parent()


def _tokenize(number: int, shard: Shard, skip: int) -> None:
    """Runs in a process of the pool: writes the chunks of a unit into files."""
    for k, chunk in enumerate(_tokenizing.chunks(shard, skip, _scratch / f"{number}")):
        partial = _place(_scratch, number, k).with_suffix(".partial")
        with partial.open("wb") as file:
            pickle.dump(chunk, file, protocol=5)
        partial.rename(_place(_scratch, number, k))
