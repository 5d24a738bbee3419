"""Times things that do the same, in turn, so that changes of the machine's speed fall on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One line of a benchmark. A field is None where it was not measured."""

    name: str
    median_ms: float
    spread: tuple[float, float]  # quartiles of the ratio
    ratio: float  # time over that of `relative_to` in the same round, median over rounds
    relative_to: str  # the name of another entry
    rate: float | None = None  # units per second
    unit: str | None = None  # of the rate, "tokens/s" for example
    memory_mb: tuple[float, float] | None = None  # resident memory after a tenth of a run and at its end
    mfu: float | None = None  # 0 to 1
    memory_gb: float | None = None  # peak of the GPU's tensors
    activations_mb: float | None = None  # kept for the backward pass
    gb_per_s: float | None = None  # the bytes that must at least be read and written, over the time
    of_ceiling: float | None = None  # gb_per_s over that of a plain copy on the same device
    error: float | None = None  # the largest relative error, against fp64, of an output or a gradient
    document_tokens: float | None = None  # mean length of the documents that attention was timed on

    def json(self) -> dict[str, Any]:
        """All fields by name, for a JSON file."""
        return asdict(self)


Run = Callable[[], float]  # does the work once; returns its number of units (tokens, rows, bytes)
Measure = Callable[[Run], tuple[float, float]]  # gives the seconds and units of a run


def by(clock: Callable[[], float]) -> Measure:
    """Measures a run by `clock`, which gives seconds."""

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
    """Runs each of `runs` once in every round; the first of rounds + 1 does not count. An entry for each run.

    relative_to: the run that the others are compared with. unit: of what runs return.
    """
    seconds_per_unit: dict[str, list[float]] = {name: [] for name in runs}
    units: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            run_seconds, units[name] = measure(run)
            if number:
                seconds_per_unit[name].append(run_seconds / units[name])
    entries = []
    for name, taken in seconds_per_unit.items():
        ratios = [one / other for one, other in zip(taken, seconds_per_unit[relative_to], strict=True)]
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
    """The lower and the upper quartile, each one of the values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
