"""Where the records of a run go: the contract of a sink, and the sinks that are files."""

import json
import math
from pathlib import Path
from typing import Any, Protocol

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_atomically


class Sink(Protocol):
    """Takes what the training loop has to tell. Sinks live on rank 0 only."""

    def log(self, record: dict[str, Any]) -> None:
        """Takes one record: {"kind": "train" | "eval", "step": n, "tokens": n, ...}, values plain numbers or None."""

    def message(self, text: str) -> None:
        """Takes one line for people."""

    def close(self, reason: str) -> None:
        """Ends the run; `reason` says how. Nothing follows."""


class JsonlSink:
    """`metrics.jsonl`: one JSON object a line, floats with all their digits, NaN and infinities as null.

    A kill loses at most the line in flight. No (kind, step) is ever written twice: opening the file cuts
    off the records after the step that the run resumes from (all of them when it starts anew), and a
    record that is already there is not written again, because a run saves before it evaluates and may
    therefore evaluate its last step a second time.

    resume_step: completed steps of the checkpoint that the run goes on from, None without one.
    Afterwards `dropped` is the number of lines that were cut off.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept: list[bytes] = []
        self._written: set[tuple[str, int]] = set()
        for line in lines:
            key = _record_key(line)
            if key is not None and resume_step is not None and key[1] <= resume_step and key not in self._written:
                kept.append(line)
                self._written.add(key)
        self.dropped = len(lines) - len(kept)
        if self.dropped:
            write_atomically(path, b"".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, record: dict[str, Any]) -> None:
        key = (record["kind"], record["step"])
        if key in self._written:
            return
        self._written.add(key)
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        try:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be written ({error.strerror}). Make room; the same command continues the run."
            ) from error

    def message(self, text: str) -> None:
        pass

    def close(self, reason: str) -> None:
        self._file.close()


def _record_key(line: bytes) -> tuple[str, int] | None:
    """(kind, step) of a complete line, None for one torn by a kill."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        return record["kind"], int(record["step"])
    except (ValueError, TypeError, KeyError):
        return None


class TensorboardSink:
    """TensorBoard event files in `directory`, over steps."""

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard itself hides the points from purge_step on that an earlier start wrote.
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def message(self, text: str) -> None:
        pass

    def close(self, reason: str) -> None:
        self._writer.close()
