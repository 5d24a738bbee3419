"""The rows of virtual streams, tokenized ahead in processes of their own.

Row n of the run is the next row of stream n mod n_streams, and rank r of R takes the rows n with n mod R = r. So a rank
reads the streams s with s mod g = r mod g, where g is the greatest common divisor of R and n_streams. It reads them
alone where R divides n_streams; else R / g ranks read each stream, and each of them makes all of its rows and leaves
out those of the others.

Worker w of N makes the rows of those streams whose place among the rank's is w mod N, in the order in which the rank
takes them, each with the cursor after it. A cursor counts when its row is taken, so whatever was made ahead is made
again after a resume.
"""

from __future__ import annotations

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
from numpy.typing import NDArray

from ngpt_train.core.errors import DataError
from ngpt_train.core.processes import end_with_parent
from ngpt_train.data.position import Reader, Share
from ngpt_train.data.rows import Batch, Cursor
from ngpt_train.data.streamed.stream import Stream, Windows
from ngpt_train.data.streamed.streamed_text import Start, StreamedText
from ngpt_train.data.tokenizers.tokenizer import Ids

SENT_TOKENS = 65_536  # that a worker sends at once, after smaller blocks at the start
POLL_SECONDS = 1.0
LEFT_TO_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}

OnWait = Callable[[float], None]


class Streams:
    """Some of the virtual streams, each opened at its cursor when it is first asked."""

    def __init__(self, text: StreamedText, start: Start) -> None:
        self._text, self._cursors, self._given = text, start.cursors, start.rows.copy()
        self._windows = Windows(text.open(start.skipped), text.settings)
        self._rows: dict[int, Iterator[tuple[Ids, Cursor]]] = {}

    @property
    def skipped(self) -> dict[str, str]:
        return self._windows.text.skipped

    def row(self, number: int) -> tuple[Ids, Cursor]:
        """Row `number`, later than all rows of its stream before, and the cursor after it."""
        place, stream = divmod(number, self._text.settings.n_streams)
        if stream not in self._rows:
            opened = Stream(self._windows, self._text.tokenizer, stream)
            self._rows[stream] = opened.rows(Cursor(*self._cursors[stream].tolist()))
        for _ in range(self._given[stream], place):
            next(self._rows[stream])  # another rank's
        self._given[stream] = place + 1
        return next(self._rows[stream])


class StreamReader(Reader):
    """This rank's rows of a streamed text, in the order of `numbers`, and the cursors after those that were taken.

    numbers: of the rows that the rank will take, without an end; row n is of stream n mod n_streams.
    workers: processes; 0 tokenizes where the rows are taken. prefetch: blocks that each may be ahead. on_wait: is told
    every second how many seconds a row of a worker has been waited for, and may raise.
    """

    def __init__(
        self,
        text: StreamedText,
        numbers: Iterable[int],
        start: Start,
        share: Share,
        workers: int,
        prefetch: int,
        on_wait: OnWait = lambda seconds: None,
    ) -> None:
        self._form, self._n_streams = text.settings.form, text.settings.n_streams
        owned = share.streams(self._n_streams)
        self._cursors = np.full_like(start.cursors, -1)
        self._cursors[owned] = start.cursors[owned]
        self._skipped = dict(start.skipped)
        self._worker_of = {stream: place % max(1, workers) for place, stream in enumerate(owned)}
        self._streams = Streams(text, start) if workers == 0 else None
        self._workers = [
            Worker(text, numbers, {s for s in owned if self._worker_of[s] == w}, start, prefetch, on_wait)
            for w in range(min(workers, len(owned)))
        ]

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        ids = np.empty((len(numbers), self._form.context + 1), np.int64)
        for row, number in zip(ids, numbers.tolist(), strict=True):
            stream = number % self._n_streams
            maker = self._streams or self._workers[self._worker_of[stream]]
            row[:], self._cursors[stream] = maker.row(number)
            self._skipped |= maker.skipped
        return self._form.batch(ids)

    def cursors(self) -> dict[str, NDArray[np.int64]]:
        """(n_streams, 5): of the row after the last one taken."""
        return {"cursors": self._cursors.copy()}

    def skipped(self) -> dict[str, str]:
        return self._skipped

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class Worker:
    """A process that makes the rows of some streams."""

    def __init__(
        self,
        text: StreamedText,
        numbers: Iterable[int],
        streams: set[int],
        start: Start,
        prefetch: int,
        on_wait: OnWait,
    ) -> None:
        self._on_wait = on_wait
        # Not forked: a child of a process with threads, or with a GPU, may hang.
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(prefetch)
        self._process = context.Process(
            target=_make_rows, args=(text, numbers, streams, start, self._queue), name="data worker", daemon=True
        )
        # Ctrl-C reaches the whole terminal, and SIGTERM often all processes of a job. A worker inherits that they are
        # blocked: the trainer, which may need more rows to end its step, stops its workers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_TRAINER)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # Our copy of the worker's end of the pipe: while it is open, the block of a worker that was killed never ends.
        self._queue._writer.close()  # type: ignore[attr-defined]
        # For a trainer that exits without `close`: a worker blocks the SIGTERM that multiprocessing would send.
        self._kill = Finalize(self, self._process.kill, exitpriority=0)
        # A thread reads the pipe: where a worker is stopped in the middle of a block, the read hears no signal.
        self._received: queue.Queue[Any] = queue.Queue(1)
        self._closed = threading.Event()
        threading.Thread(target=self._forward, name="rows of a data worker", daemon=True).start()
        self._block: Iterator[tuple[Ids, Any]] = iter(())
        self.skipped: dict[str, str] = {}

    def row(self, number: int) -> tuple[Ids, Any]:
        """The next row, which is row `number`. Raises what was raised in the process."""
        for row in self._block:
            return row
        ids, cursors, self.skipped = self._receive()
        self._block = zip(ids, cursors, strict=True)
        return next(self._block)

    def _receive(self) -> tuple[Ids, NDArray[np.int64], dict[str, str]]:
        began = time.monotonic()
        while True:
            try:
                item = self._received.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._on_wait(time.monotonic() - began)
                continue
            if item is None:
                raise self._died()
            if isinstance(item, Exception):
                raise item
            return item

    def _forward(self) -> None:
        """Takes what the process sends, until it ends or fails; None if it died."""
        item: Any = ()
        while item is not None and not isinstance(item, Exception) and not self._closed.is_set():
            try:
                item = self._queue.get()
            except (EOFError, OSError):  # after all of its blocks, or within one
                item = None
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    self._received.put(item, timeout=POLL_SECONDS)
                    break

    def _died(self) -> DataError:
        self._process.join(10)
        return DataError(
            f"a data worker ended without a word (exit code {self._process.exitcode}; -9 is often a lack of memory); "
            "run the same command again, or with data.workers=0 to see more"
        )

    def close(self) -> None:
        self._closed.set()
        self._kill()
        self._process.join()
        self._queue.close()


def _make_rows(text: StreamedText, numbers: Iterable[int], streams: set[int], start: Start, rows: Any) -> None:
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
            send()  # rows before the fault are as good as ever
        known = isinstance(error, DataError)
        rows.put(error if known else RuntimeError(f"a data worker failed:\n{traceback.format_exc()}"))
