"""The rows of virtual streams, tokenized ahead in worker processes.

Row n of the run is the next row of stream n mod n_streams, and rank r of R takes the rows n with n mod R = r. So a rank
reads the streams s with s mod g = r mod g, where g is the greatest common divisor of R and n_streams. If R divides
n_streams, it reads them alone. Else R / g ranks read each stream, and each of them makes all rows of the stream and
drops the rows of other ranks.

The rank's k-th stream is made by worker k mod N of N, in the order in which the rank takes the rows, each with the
cursor after it. A cursor counts when its row is taken, so rows made ahead are made again after a resume.
"""

import contextlib
import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from ngpt_train.config.schema import DataConfig
from ngpt_train.core.errors import DataError
from ngpt_train.core.launcher import end_with_parent
from ngpt_train.data.loader import Reader, ReaderState, Share
from ngpt_train.data.rows import Batch
from ngpt_train.data.streamed_text import Cursor, Start, Stream, StreamedText, Windows
from ngpt_train.data.tokenizers.tokenizer import Ids, Ints

SENT_TOKENS = 65_536  # tokens of a worker's block; the first blocks are smaller
POLL_SECONDS = 1.0
LEFT_TO_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}

OnWait = Callable[[float], None]


class Streams:
    """Some of the virtual streams. Each is opened at its cursor for its first row."""

    def __init__(self, text: StreamedText, start: Start) -> None:
        self._text, self._cursors, self._given = text, start.cursors, start.rows.copy()
        self._windows = Windows(text.open(start.skipped), text.settings)
        self._rows: dict[int, Iterator[tuple[Ids, Cursor]]] = {}

    @property
    def skipped(self) -> dict[str, str]:
        return self._windows.text.skipped

    def row(self, number: int) -> tuple[Ids, Cursor]:
        """Row `number` and the cursor after it. The numbers of a stream's rows increase from call to call."""
        place, stream = divmod(number, self._text.settings.n_streams)
        if stream not in self._rows:
            opened = Stream(self._windows, self._text.tokenizer, stream)
            self._rows[stream] = opened.rows(Cursor(*self._cursors[stream].tolist()))
        for _ in range(self._given[stream], place):
            next(self._rows[stream])  # a row of another rank
        self._given[stream] = place + 1
        return next(self._rows[stream])


class StreamReader(Reader):
    """This rank's rows of a streamed text, and the cursors after the rows taken so far.

    numbers: the endless numbers of the rank's rows in order. Row n is of stream n mod n_streams.
    data.workers: number of processes; 0 tokenizes in this process. data.prefetch: blocks that a worker may be ahead.
    on_wait: is called every second with the seconds of the current wait for a worker, and may raise.
    """

    def __init__(
        self, text: StreamedText, numbers: Iterable[int], start: Start, share: Share, data: DataConfig, on_wait: OnWait
    ) -> None:
        self._form, self._n_streams = text.settings.form, text.settings.n_streams
        owned = share.streams(self._n_streams)
        self._cursors = np.full_like(start.cursors, -1)
        self._cursors[owned] = start.cursors[owned]
        self._skipped = dict(start.skipped)
        self._worker_of = {stream: place % max(1, data.workers) for place, stream in enumerate(owned)}
        self._streams = Streams(text, start) if data.workers == 0 else None
        self._workers = [
            Worker((text, numbers, {s for s in owned if self._worker_of[s] == w}, start), data.prefetch, on_wait)
            for w in range(min(data.workers, len(owned)))
        ]

    def take(self, numbers: Ints) -> Batch:
        ids = np.empty((len(numbers), self._form.context + 1), np.int64)
        for row, number in zip(ids, numbers.tolist(), strict=True):
            stream = number % self._n_streams
            maker = self._streams or self._workers[self._worker_of[stream]]
            row[:], self._cursors[stream] = maker.row(number)
            self._skipped |= maker.skipped
        return self._form.batch(ids)

    def state(self) -> ReaderState:
        return ReaderState({"cursors": self._cursors.copy()}, self._skipped, {})

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class Worker:
    """A process that makes rows. arguments: of `_make_rows`, without its queue."""

    def __init__(self, arguments: tuple[Any, ...], prefetch: int, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        # Not forked: a child of a process with threads, or with a GPU, may hang.
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(prefetch)
        self._process = context.Process(
            target=_make_rows, args=(*arguments, self._queue), name="data worker", daemon=True
        )
        # Ctrl-C reaches the whole terminal, and SIGTERM often all processes of a job. A worker inherits the blocked
        # signals: the trainer may need more rows to end its step, and stops its workers itself.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_TRAINER)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # Closes our copy of the worker's end of the pipe. While it is open, the block of a killed worker never ends.
        self._queue._writer.close()  # type: ignore[attr-defined]
        # For a trainer that exits without `close`: the worker blocks multiprocessing's SIGTERM.
        self._kill = Finalize(self, self._process.kill, exitpriority=0)
        # A thread reads the pipe, because a read from a worker that stopped within a block hears no signal.
        self._received: queue.Queue[Any] = queue.Queue(1)
        self._closed = threading.Event()
        threading.Thread(target=self._forward, name="rows of a data worker", daemon=True).start()
        self._block: Iterator[tuple[Ids, Any]] = iter(())
        self.skipped: dict[str, str] = {}

    def row(self, number: int) -> tuple[Ids, Any]:
        """The next row, which has to be row `number`. Raises the error of the process."""
        for row in self._block:
            return row
        ids, cursors, self.skipped = self._receive()
        self._block = zip(ids, cursors, strict=True)
        return next(self._block)

    def _receive(self) -> tuple[Ids, Ints, dict[str, str]]:
        began = time.monotonic()
        while True:
            try:
                item = self._received.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._on_wait(time.monotonic() - began)
                continue
            if item is None:
                self._process.join(10)
                raise DataError(
                    f"a data worker ended without a word (exit code {self._process.exitcode}; -9 is often a lack of "
                    "memory); run the same command again, or with data.workers=0 to see more"
                )
            if isinstance(item, Exception):
                raise item
            return item

    def _forward(self) -> None:
        """Passes on the process's blocks until it ends or fails. Passes None if it died."""
        item: Any = ()
        while item is not None and not isinstance(item, Exception) and not self._closed.is_set():
            try:
                item = self._queue.get()
            except (EOFError, OSError):  # after the last block, or within a block
                item = None
            except Exception as error:  # a block that cannot be read, for want of memory
                item = error
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    self._received.put(item, timeout=POLL_SECONDS)
                    break

    def close(self) -> None:
        self._closed.set()
        self._kill()
        self._process.join()
        self._queue.close()


def _make_rows(text: StreamedText, numbers: Iterable[int], streams: set[int], start: Start, rows: Any) -> None:
    """Runs in the process: puts blocks of rows of `streams` into the queue `rows`."""
    end_with_parent()
    made: list[tuple[Ids, Cursor]] = []

    def send() -> None:
        cursors = np.array([cursor for _, cursor in made])
        rows.put((np.stack([ids for ids, _ in made]), cursors, dict(opened.skipped)))
        made.clear()

    try:
        opened = Streams(text, start)
        n_streams, length = text.settings.n_streams, text.settings.form.context + 1
        block = 1
        for number in numbers:
            if number % n_streams not in streams:
                continue
            made.append(opened.row(number))
            if len(made) == block:
                send()
                block = min(2 * block, max(1, SENT_TOKENS // length))
    except Exception as error:
        if made:
            send()  # rows before the fault are good
        known = isinstance(error, DataError)
        rows.put(error if known else RuntimeError(f"a data worker failed:\n{traceback.format_exc()}"))
