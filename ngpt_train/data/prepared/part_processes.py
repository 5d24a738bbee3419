"""Parts of a text in its order, tokenized by several processes.

Each process works on a unit of its own and lays its parts into files; what waits for its turn waits on the disk. A
process that is killed ends the work with an error, and processes whose parent is killed end by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.core.errors import DataError
from ngpt_train.data.prepared.parts import Part, Tokenizing
from ngpt_train.data.prepared.units import Unit
from ngpt_train.data.tokenizers import read_tokenizer

# Units that may be under way or wait for their turn, per process: bounds the disk that they take.
AHEAD = 3
Heard = Callable[[int, int, int], None]  # unit, documents, bytes of text


def n_processes(setting: int | str, n_units: int) -> int:
    """How many processes `data.prepare_workers` stands for: no more than there is work for."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(available if setting == AUTO else int(setting), n_units))


def parts_in_order(
    units: Sequence[Unit],
    start: tuple[int, int],
    tokenizing: Tokenizing,
    directory: Path,
    tokenizer_entry: dict[str, Any],
    processes: int,
    scratch: Path,
    heard: Heard,
) -> Generator[tuple[int, Part], None, None]:
    """(unit, part) of all units from `start` on: a unit, and how many of its documents are done.

    directory: holds the tokenizer of `tokenizer_entry`; scratch: a directory for what waits. heard: told of each part
    when it is made, not when its turn comes. Raises what reading raises, in the order of the text.
    """
    if processes == 1:
        for number in range(start[0], len(units)):
            own = scratch / f"{number}"
            own.mkdir()
            for part in tokenizing.parts(units[number].shard, start[1] if number == start[0] else 0, own):
                heard(number, part.counts.documents, part.counts.bytes)
                yield number, part
            shutil.rmtree(own)
        return
    with ExitStack() as stack:
        workers = []
        for _ in range(processes):
            workers.append(_Process(tokenizing, directory, tokenizer_entry, scratch))
            stack.callback(workers[-1].close)
        yield from _collect(units, start, workers, heard)


def _collect(
    units: Sequence[Unit], start: tuple[int, int], workers: list[_Process], heard: Heard
) -> Generator[tuple[int, Part], None, None]:
    waiting: dict[int, deque[Path | Exception | None]] = {}  # what each unit has made; None is its end
    following, failed = start[0], False
    turn = start[0]
    while turn < len(units):
        for worker in workers:
            if worker.idle and not failed and following < min(len(units), turn + AHEAD * len(workers)):
                waiting[following] = deque()
                worker.begin(following, units[following], start[1] if following == start[0] else 0)
                following += 1
        while waiting[turn]:
            item = waiting[turn].popleft()
            if isinstance(item, Exception):
                raise item
            if item is None:
                del waiting[turn]
                turn += 1
                break
            yield turn, load_part(item)
        else:
            for connection in wait([worker.connection for worker in workers]):
                worker = next(w for w in workers if w.connection is connection)
                number, item, documents, n_bytes = worker.receive()
                waiting[number].append(item)
                failed |= isinstance(item, Exception)
                heard(number, documents, n_bytes)


def load_part(path: Path) -> Part:
    with path.open("rb") as file:
        part = pickle.load(file)
    path.unlink()
    return part


class _Process:
    """A process that tokenizes one unit after the other."""

    def __init__(self, tokenizing: Tokenizing, directory: Path, tokenizer_entry: dict[str, Any], scratch: Path) -> None:
        # Not forked: a child of a process with threads, or with a GPU, may hang.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        settings = (tokenizing.reader, tokenizing.dtype, tokenizing.val_fraction, tokenizing.single)
        self._process = context.Process(
            target=_work, args=(theirs, settings, directory, tokenizer_entry, scratch), name="prepare", daemon=True
        )
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        self.idle = True

    def begin(self, number: int, unit: Unit, skip: int) -> None:
        self.idle = False
        try:
            self.connection.send((number, unit.shard, skip))
        except OSError:
            raise self._died() from None

    def receive(self) -> tuple[int, Path | Exception | None, int, int]:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        self.idle = not isinstance(message[1], Path)
        return message

    def close(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()

    def _died(self) -> DataError:
        self._process.join(10)
        return DataError(
            f"a process of `prepare` ended without a word (exit code {self._process.exitcode}; -9 is often a lack of "
            "memory). Run the same command again: it goes on after the last finished shard; fewer "
            "data.prepare_workers need less memory"
        )


def _work(
    connection: Connection, settings: tuple[Any, ...], directory: Path, tokenizer_entry: dict[str, Any], scratch: Path
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends its processes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what is parallel
    tokenizing = None
    try:
        while True:
            number, shard, skip = connection.recv()
            try:
                if tokenizing is None:
                    reader, dtype, val_fraction, single = settings
                    tokenizer = read_tokenizer(directory, tokenizer_entry)
                    tokenizing = Tokenizing(reader, tokenizer, dtype, val_fraction, single)
                own = scratch / f"{number}"
                own.mkdir()
                for k, part in enumerate(tokenizing.parts(shard, skip, own)):
                    path = scratch / f"{number}-{k}.part"
                    with path.open("wb") as file:
                        pickle.dump(part, file, protocol=5)
                    connection.send((number, path, part.counts.documents, part.counts.bytes))
                shutil.rmtree(own)
                connection.send((number, None, 0, 0))
            except (BrokenPipeError, ConnectionError):
                raise
            except (DataError, OSError) as error:  # such as of a full disk
                connection.send((number, error, 0, 0))
            except Exception:
                problem = RuntimeError(f"a process of `prepare` failed:\n{traceback.format_exc()}")
                connection.send((number, problem, 0, 0))
    except (EOFError, OSError):
        return  # the parent is gone
