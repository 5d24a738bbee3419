"""The figures of several runs: each run is measured by itself, then what needs all of them is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ngpt_train.analysis.figures import FIGURES
from ngpt_train.analysis.measures.of_run import Curve, NoMeaning, OfRun


@dataclass(frozen=True)
class Skipped:
    figure: str
    run: str
    why: str  # the end of a sentence about the run


@dataclass
class Measured:
    """curves: by figure and run. The first run is the one that ratios are to, also of figures that it is not in."""

    curves: dict[str, dict[str, list[Curve]]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


def measure(runs: Iterable[OfRun], names: Sequence[str]) -> Measured:
    """The figures `names` of the runs. One run is taken from `runs` after the other, so only one needs to be in
    memory."""
    found = Measured({name: {} for name in names})
    for run in runs:
        for name in names:
            try:
                found.curves[name][run.name] = FIGURES[name].measure(run)
            except NoMeaning as why:
                found.skipped.append(Skipped(name, run.name, str(why)))
    for name in names:
        curves: Mapping[str, list[Curve]] = found.curves[name]
        together = FIGURES[name].together
        if curves and together is not None:
            found.curves[name] = together(curves)
        if not curves:
            del found.curves[name]
    return found
