"""Times of things that do the same, taken in turn, so that a machine's moods fall on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One line of a benchmark. ratio: of the time to that of `relative_to`, the median over rounds; spread: its
    quartiles; memory_mb: resident after a tenth and at the end, of runs that are about memory; memory_gb: a GPU's peak;
    activations_mb: kept for the backward pass; gb_per_s: the bytes that have to be moved at the least, over the time;
    of_ceiling: that, of what a plain copy reaches on the same device; error: relative, the largest of all outputs and
    gradients, against fp64; document_tokens: the mean length of the documents that attention was timed on."""

    name: str
    median_ms: float
    spread: tuple[float, float]
    ratio: float
    relative_to: str
    rate: float | None = None
    unit: str | None = None
    memory_mb: tuple[float, float] | None = None
    mfu: float | None = None
    memory_gb: float | None = None
    activations_mb: float | None = None
    gb_per_s: float | None = None
    of_ceiling: float | None = None
    error: float | None = None
    document_tokens: float | None = None

    def json(self) -> dict[str, Any]:
        return asdict(self)


Run = Callable[[], float]  # does something; returns how many units of it, for the rate
Measure = Callable[[Run], tuple[float, float]]  # calls a run once; its seconds and units


def by(clock: Callable[[], float]) -> Measure:
    def measure(run: Run) -> tuple[float, float]:
        started = clock()
        units = run()
        return clock() - started, units

    return measure


WALL = by(time.perf_counter)


def interleaved(
    runs: Mapping[str, Run],
    relative_to: str,
    rounds: int,
    unit: str = "units",
    measure: Measure = WALL,
) -> list[Entry]:
    """Runs each of `runs` once a round, the first round untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    units: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            taken_by_run, units[name] = measure(run)
            if number:
                seconds[name].append(taken_by_run / units[name])
    entries = []
    for name, taken in seconds.items():
        ratios = [one / other for one, other in zip(taken, seconds[relative_to], strict=True)]
        entries.append(
            Entry(
                name,
                1e3 * statistics.median(taken) * units[name],
                quartiles(ratios),
                statistics.median(ratios),
                relative_to,
                1 / statistics.median(taken),
                f"{unit}/s",
            )
        )
    return entries


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
