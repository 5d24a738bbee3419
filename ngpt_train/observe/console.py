"""The display of a run for people: a live bar on a terminal, plain lines elsewhere and in the log file."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ngpt_train.core.progress import format_seconds
from ngpt_train.core.recorded import Sink, measured
from ngpt_train.core.secrets import redacted

# Kinds of records. A telemetry record has too many numbers for a line.
SHOWN = ("train", "eval", "tasks", "sample")


class Clock:
    """Estimates the seconds to the end of this start, from recent step times.
    stop_at: the last step of this start; None: total_steps."""

    def __init__(self, total_steps: int, stop_at: int | None = None) -> None:
        self.total_steps = total_steps
        self._last = stop_at or total_steps
        self._step_time: float | None = None

    def remaining(self, step: int, step_time: float) -> float:
        """Seconds left after `step`; step_time is the seconds per step since the last call."""
        # Recent step times have most weight, so that the first steps, with compilation, are soon forgotten.
        self._step_time = step_time if self._step_time is None else 0.7 * step_time + 0.3 * self._step_time
        return max(self._last - step, 0) * self._step_time


def format_count(value: float) -> str:
    """A number in three digits and a unit: 1234567 -> 1.23M."""
    value = float(f"{value:.3g}")
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def describe_train(record: dict[str, Any], eta: float) -> str:
    """`loss 4.1234  mean 4.1301  lr 1.9e-02  grad 0.81  12.3k tok/s  mfu 31.2%  eta 3m12s`, mfu only if it is known.
    mean: loss_mean, the mean loss since the last record."""
    parts = [
        f"loss {record['loss']:.4f}",
        f"mean {record['loss_mean']:.4f}",
        f"lr {record['lr']:.1e}",
        f"grad {record['grad_norm']:.2f}",
        f"{format_count(record['tokens_per_s'])} tok/s",
    ]
    if record["mfu"] is not None:
        parts.append(f"mfu {100 * record['mfu']:.1f}%")
    if record["skipped"]:
        parts.append(f"skipped {record['skipped']}")
    parts.append(f"eta {format_seconds(eta)}")
    return "  ".join(parts)


def describe_tasks(record: dict[str, Any]) -> str:
    """`mean 0.4512 ± 0.0061 (chance 0.3750)  arc_easy 0.5610 (chance 0.2500)`: accuracies, and the accuracy of guessing
    where it is known. A task without an accuracy shows its first metric."""

    def beside(chance: float | None) -> str:
        return "" if chance is None else f" (chance {chance:.4f})"

    parts = []
    if "mean" in record:
        parts.append(f"mean {record['mean']:.4f} ± {record['mean_stderr']:.4f}{beside(record.get('mean_chance'))}")
    of_tasks: dict[str, dict[str, float]] = {}
    for name, value in record.items():
        task, _, metric = name.rpartition("/")
        if task:
            of_tasks.setdefault(task, {})[metric] = value
    for task, metrics in of_tasks.items():
        metric = "acc" if "acc" in metrics else next(iter(metrics))
        name = task if metric == "acc" else f"{task} {metric}"
        parts.append(f"{name} {metrics[metric]:.4f}{beside(metrics.get('chance'))}")
    return "  ".join(parts)


def describe(record: dict[str, Any], clock: Clock) -> str:
    progress = f"{record['step']}/{clock.total_steps}"
    if record["kind"] == "eval":
        return f"eval {progress}  loss {record['loss']:.4f}  {measured(record, digits=4)}"
    if record["kind"] == "tasks":
        return f"tasks {progress}  {describe_tasks(record)}"
    if record["kind"] == "sample":  # on one line, as JSON has it
        return f"sample {progress}  {json.dumps(record['prompt'] + record['text'], ensure_ascii=False)}"
    return f"step {progress}  {describe_train(record, clock.remaining(record['step'], record['step_time']))}"


class PlainConsole(Sink):
    """One line per record on the standard output, for pipes and CI."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def log(self, record: dict[str, Any]) -> None:
        if record["kind"] in SHOWN:
            self.message(describe(record, self.clock))

    def message(self, text: str) -> None:
        try:
            print(text, flush=True)
        except OSError:
            # The reader of the output is gone (`| head`, a closed terminal). The run goes on and has a log file.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self, reason: str) -> None:
        self.message(f"end: {reason}")


class LiveConsole(PlainConsole):
    """A progress bar at the foot of the terminal; validations and messages scroll above it."""

    def __init__(self, clock: Clock, resume_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(clock)
        # The bar is drawn with each record, not by a thread, which would take time from training.
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=Console(highlight=False),
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=clock.total_steps, completed=resume_step)
        self._progress.start()
        self._progress.refresh()

    def log(self, record: dict[str, Any]) -> None:
        if record["kind"] != "train":
            super().log(record)
            return
        eta = self.clock.remaining(record["step"], record["step_time"])
        self._progress.update(self._task, completed=record["step"], description=describe_train(record, eta))
        self._progress.refresh()

    def message(self, text: str) -> None:
        # Not as markup: a path or a config value may hold square brackets.
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def close(self, reason: str) -> None:
        self._progress.stop()
        print(f"end: {reason}", flush=True)


class LogFile(PlainConsole):
    """Appends plain lines to a file, each with its time."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(clock)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def message(self, text: str) -> None:
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {redacted(text)}\n")
            self._file.flush()
        except OSError as error:  # no reason to stop: if the disk is full, metrics.jsonl and checkpoints will say so
            print(f"warning: {self._file.name}: {error.strerror}: {text}", file=sys.stderr)

    def close(self, reason: str) -> None:
        super().close(reason)
        self._file.close()


def console_sink(clock: Clock, resume_step: int | None) -> PlainConsole:
    """A live console if the terminal of standard output can redraw a line, else a plain one."""
    if sys.stdout.isatty():
        from rich.console import Console  # here: it takes a tenth of a start

        if not Console().is_dumb_terminal:
            return LiveConsole(clock, resume_step or 0)
    return PlainConsole(clock)
