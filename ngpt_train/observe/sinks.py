"""The sinks that write files: metrics.jsonl and TensorBoard."""

import contextlib
import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

from ngpt_train.core.files import json_lines, write_atomically
from ngpt_train.core.recorded import Sink, finite

logger = logging.getLogger(__name__)


class JsonlSink(Sink):
    """`metrics.jsonl`: one JSON object a line, floats with all their digits, NaN and infinities as null.

    A kill loses at most the line that is being written. While the disk is full, records stay in memory and are written
    with a later one, so that the run goes on. No (kind, step) is in the file twice. Opening the file cuts off the
    records after `resume_step`, or all records of a new run. A record in the file is not written again: a run saves
    before it evaluates, so a resumed run may repeat an evaluation.

    resume_step: the step of the checkpoint on a resume; None for a new run. rollbacks: their number so far; records of
    later rollbacks are cut off too. dropped: the number of lines that were cut off.
    """

    def __init__(self, path: Path, resume_step: int | None, rollbacks: int = 0) -> None:
        self.path = path
        kept: list[bytes] = []
        self._written: set[tuple[str, int, int]] = set()
        n_lines = 0
        for line, record in json_lines(path) if path.exists() else ():
            n_lines += 1
            key = _record_key(record)
            if key is None or resume_step is None or key[1] > resume_step or key[2] > rollbacks:
                continue
            if key not in self._written:
                kept.append(line)
                self._written.add(key)
        self.dropped = n_lines - len(kept)
        if self.dropped:
            write_atomically(path, b"".join(kept))
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size  # of whole lines
        self._pending: list[bytes] = []

    def log(self, record: dict[str, Any]) -> None:
        key = (record["kind"], record["step"], record.get("number", 0))
        if key in self._written:
            return
        self._written.add(key)
        self._pending.append((json.dumps(finite(record), allow_nan=False) + "\n").encode())
        try:
            self._write()
        except OSError as error:
            logger.warning(
                "%s: cannot be written (%s). Make room; %d records are kept in memory until then.",
                *(self.path, error.strerror, len(self._pending)),
            )

    def _write(self) -> None:
        """Writes the pending lines, all or none. Raises OSError."""
        content = b"".join(self._pending)
        try:
            written = self._file.write(content)
            if written < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(content)
        self._pending.clear()

    def close(self, reason: str) -> None:
        """Raises OSError for records that could not be written."""
        try:
            self._write()
        except OSError as error:
            raise OSError(error.errno, f"{len(self._pending)} records of {self.path} are lost: {error}") from None
        finally:
            self._file.close()


def _record_key(record: dict[str, Any] | None) -> tuple[str, int, int] | None:
    """(kind, step, number) of a record; None for a damaged line, for example after a kill. Only rollbacks have a number
    other than 0."""
    fields = record or {}
    kind, step, number = fields.get("kind"), fields.get("step"), fields.get("number", 0)
    return (kind, step, number) if isinstance(kind, str) and type(step) is type(number) is int else None


class TensorboardSink(Sink):
    """TensorBoard event files in `directory`, with the step as x axis."""

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides the points of earlier starts from purge_step on.
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
            elif name in ("prompt", "text"):  # of a sample
                self._writer.add_text(f"{record['kind']}/{name}", value, record["step"])

    def close(self, reason: str) -> None:
        self._writer.close()
