"""Sinks, which take the records of a run: their protocol, and the sinks that write files."""

import json
import math
from pathlib import Path
from typing import Any, Protocol

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_atomically


class Sink(Protocol):
    """Takes the records and messages of the training loop. Only rank 0 has sinks."""

    def log(self, record: dict[str, Any]) -> None:
        """Takes a record {"kind": "train" | "eval" | "telemetry", "step": n, "tokens": n, ...}.

        Its other values are numbers or None.
        """

    def message(self, text: str) -> None:
        """Takes one line for people."""

    def close(self, reason: str) -> None:
        """Called once, last. reason: how the run ended."""


class JsonlSink:
    """`metrics.jsonl`: one JSON object a line, floats with all their digits, NaN and infinities as null.

    A kill loses at most the line that is being written. No (kind, step) is in the file twice. Opening the file cuts off
    the records after the step that the run resumes from, or all records if the run starts anew. A record that is in the
    file already is not written again: a run saves before it evaluates, so a resumed run may repeat an evaluation.

    resume_step: completed steps of the checkpoint that the run resumes from, None without one.
    After the construction `dropped` is the number of lines that were cut off.
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
    """(kind, step) of a complete line; None for a line that a kill has cut short."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        return record["kind"], int(record["step"])
    except (ValueError, TypeError, KeyError):
        return None


class TensorboardSink:
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

    def message(self, text: str) -> None:
        pass

    def close(self, reason: str) -> None:
        self._writer.close()
