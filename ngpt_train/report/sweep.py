"""The table at the end of a sweep of `train`: a line for each of its jobs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ngpt_train.core.errors import DataError
from ngpt_train.core.recorded import Record, read_end, read_records
from ngpt_train.observe.console import format_count

# A job with these exit codes may have ended before its first step: its directory may hold an earlier start's losses.
BEFORE_ITS_START = (2, 3)


def results(jobs: Sequence[Sequence[str]], runs: Sequence[Path], codes: Sequence[int]) -> str:
    """For each job its last losses, its tokens, its state, and the overrides that differ between jobs.

    runs: the directories of the jobs. codes: the exit codes of the started jobs.
    """
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
