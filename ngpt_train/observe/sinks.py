"""The sinks of a run, and those that write files: metrics.jsonl and TensorBoard."""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import to_dict
from ngpt_train.core.files import json_lines, write_atomically
from ngpt_train.core.recorded import Record, Sink, finite
from ngpt_train.observe.console import Clock, LogFile, console_sink
from ngpt_train.observe.wandb_sink import WandbSink

logger = logging.getLogger(__name__)


def build_sinks(
    config: Config, run_dir: Path, run_info: Record, resume_step: int | None, rollbacks: Sequence[Record] = ()
) -> list[Sink]:
    """The sinks of a run, for rank 0. They are called and closed in this order.

    run_info: this start's entry in run.json; wandb shows it beside the config. resume_step: the step of the checkpoint
    on a resume; None for a new run. rollbacks: from run.json.
    """
    metrics = JsonlSink(run_dir / "metrics.jsonl", resume_step, len(rollbacks))
    clock = partial(Clock, config.train.steps, config.train.stop_at)  # each sink has its own clock
    people: list[Sink] = [console_sink(clock(), resume_step), LogFile(run_dir / "logs" / "rank_0.log", clock())]

    def say(text: str) -> None:
        for sink in people:
            sink.message(text)

    if metrics.dropped:
        say(
            f"{metrics.path}: cut off {metrics.dropped} lines that an earlier start wrote after step {resume_step or 0}"
        )
    sinks: list[Sink] = [metrics]
    if config.logging.tensorboard:
        sinks.append(TensorboardSink(run_dir / "tensorboard", resume_step))
    mode = config.logging.wandb.used_mode
    if mode != "disabled":
        shown: dict[str, Any] = {"config": {**to_dict(config), "run_info": run_info}, "summary": {}}
        if rollbacks:
            shown["config"]["rollbacks"] = list(rollbacks)
            shown["summary"]["rollbacks"] = len(rollbacks)
        if damaged := run_info.get("damaged"):
            problems = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
            shown["summary"]["fallback"] = f"the run goes on from step {run_info['step']}; {problems}"
        sinks.append(WandbSink(config.logging.wandb, mode == "online", run_dir, shown, say))
    elif config.logging.wandb.mode == AUTO:
        say("wandb: off (logging.wandb.mode=online, logging.wandb.project=NAME or WANDB_MODE=online turn it on)")
    return [*sinks, *people]


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
