"""After the end of runs: the curves of a run, and the table of a sweep of `train`, a line for each of its jobs."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines
from ngpt_train.core.recorded import Record, read_end, read_records
from ngpt_train.observe.console import format_count

SMOOTH_FROM = 200  # records; curves of fewer are readable unsmoothed
SMOOTH_OVER = 50  # a smoothed point is the mean of 1 / SMOOTH_OVER of the records


def plot_run(run_dir: Path) -> Path:
    """Draws training and validation loss, learning rate and gradient norm over tokens, from run_dir/metrics.jsonl.

    Returns the path of the picture, run_dir/curves.png. The curves are empty where a run ended before its first record.
    Raises DataError where there is no metrics.jsonl.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        raise DataError(f"{metrics} does not exist: {run_dir} is not a run directory, or its run never started.")
    records = [record for _, record in json_lines(metrics) if record is not None]
    train = [record for record in records if record.get("kind") == "train"]
    evals = [record for record in records if record.get("kind") == "eval"]

    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    tokens = _column(train, "tokens")
    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    axes = figure.subplot_mosaic([["loss", "loss"], ["lr", "grad_norm"]], height_ratios=[1.7, 1])

    steps, means = _column(train, "loss"), _column(train, "loss_mean")  # older runs have no means
    _draw(axes["loss"], tokens, np.where(np.isnan(means), steps, means), label="training")
    if evals:
        eval_loss = _column(evals, "loss")
        label = f"validation, last {eval_loss[-1]:.4f}"
        axes["loss"].plot(_column(evals, "tokens"), eval_loss, "o-", color="C1", ms=4, label=label)
    for record in records:
        if record["kind"] == "rollback":
            axes["loss"].axvline(record["tokens"], color="C3", lw=1, ls="--", label=f"rollback {record['number']}")
    axes["loss"].set(title=run_dir.name, ylabel="loss (nats per token)")
    axes["loss"].legend()
    _draw(axes["lr"], tokens, _column(train, "lr"))
    axes["lr"].set(ylabel="learning rate", ylim=(0, None))
    axes["lr"].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    _draw(axes["grad_norm"], tokens, _column(train, "grad_norm"))
    axes["grad_norm"].set(ylabel="gradient norm (unclipped)", yscale="log")
    axes["grad_norm"].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes["grad_norm"].yaxis.set_major_formatter("{x:g}")
    axes["grad_norm"].yaxis.set_minor_formatter(NullFormatter())
    for ax in axes.values():
        ax.set(xlabel="tokens", xlim=axes["loss"].get_xlim())
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.grid(alpha=0.3)

    picture = run_dir / "curves.png"
    figure.savefig(picture)
    return picture


def _column(records: list[dict[str, Any]], name: str) -> np.ndarray:
    """The metric `name` of each record, `(records,)` fp64; NaN for null or a missing number."""
    values: list[Any] = [record.get(name) for record in records]
    are_numbers = [type(value) in (int, float) and abs(value) <= sys.float_info.max for value in values]
    return np.array([x if ok else np.nan for x, ok in zip(values, are_numbers, strict=True)], dtype=np.float64)


def _draw(ax: Any, x: np.ndarray, y: np.ndarray, label: str | None = None) -> None:
    """Draws y over x as a line; SMOOTH_FROM values or more as a pale line with their moving mean on top of it."""
    if len(y) < SMOOTH_FROM:
        ax.plot(x, y, ".-", color="C0", lw=1.2, ms=3, label=label)
        return
    window = len(y) // SMOOTH_OVER
    ax.plot(x, y, color="C0", lw=0.5, alpha=0.3)
    mean_label = label and f"{label}, mean over {window} records"
    ax.plot(x, _moving_mean(y, window), color="C0", lw=1.5, label=mean_label)


def _moving_mean(y: np.ndarray, window: int) -> np.ndarray:
    """For each value, the mean over values at most window // 2 away, without NaN; NaN if all of them are NaN."""
    finite = np.isfinite(y)
    sums = np.cumsum(np.concatenate([[0.0], np.where(finite, y, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], finite]))
    low = np.maximum(np.arange(len(y)) - window // 2, 0)
    high = np.minimum(np.arange(len(y)) + window // 2 + 1, len(y))
    n = counts[high] - counts[low]
    return np.where(n > 0, (sums[high] - sums[low]) / np.maximum(n, 1), np.nan)


# A job with these exit codes may have ended before its first step: its directory may hold an earlier start's losses.
BEFORE_ITS_START = (2, 3)


def results(jobs: Sequence[Sequence[str]], runs: Sequence[Path], codes: Sequence[int]) -> str:
    """Each job's last losses, tokens, state and own overrides. runs: their directories. codes: of the started jobs."""
    common = set.intersection(*map(set, jobs))
    lines: list[tuple[str, ...]] = [("job", "training loss", "validation loss", "tokens", "state", "overrides")]
    for number, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        own = [word for word in job if word not in common and not word.startswith("run.name=")]
        lines.append((str(number), *_end(run, codes[number] if number < len(codes) else None), " ".join(own)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _end(run: Path, code: int | None) -> Iterator[str]:
    """Training loss, validation loss, tokens and state of a job; code: None where it was not started."""
    train: Record = {}
    evaluation: Record = {}
    state = "not started" if code is None else f"failed, exit code {code}" if code else "ended"
    if code is not None and code not in BEFORE_ITS_START:
        try:
            found, _ = read_records(run / "metrics.jsonl", ["train", "eval"])
            train, evaluation = ((found[kind] or [{}])[-1] for kind in ("train", "eval"))
            end = read_end(run)
            state = end["reason"] if end is not None and not code else state
        except (DataError, OSError) as error:  # a table of the others is better than none
            state = state if code else str(error)
    for loss in (train.get("loss_mean"), evaluation.get("loss")):
        yield "-" if loss is None else f"{loss:.4f}"
    yield format_count(train["tokens"]) if "tokens" in train else "-"
    yield state
