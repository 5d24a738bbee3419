"""The output of `transfer`: the drift along each axis and the tuned rates, in words, as JSON and as a figure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.core.files import write_json
from ngpt_train.observe.console import format_count
from ngpt_train.report.page import chart as drawn
from ngpt_train.report.page.chart import Chart, Mark, styles
from ngpt_train.report.page.pictures import Picture, write_picture
from ngpt_train.study.drift import AXES, NOT_RESOLVED, Axis, Optima, Optimum, place_of

FORMAT = 1
FILE, FIGURE = "transfer.json", "transfer"


def left_out(optima: Optima) -> list[str]:
    """A sentence for each optimum outside of the fits, and for each run that has not ended."""
    lines = []
    for one in optima.found:
        where = f"{one.architecture}, {place_of({'width': one.width, 'depth': one.depth, 'tokens': one.tokens})}"
        if one.tuning.state == "edge":
            best = one.tuning.best
            why = "every run failed" if best is None else f"the best lr, {best:g}, is at the edge"
            lines.append(f"{where} is left out: untuned, {why}")
        elif not one.is_tuned:
            lines.append(f"{where} is left out: untuned, one lr was tried")
    return [*lines, *optima.notes]


def table_entries(optima: Optima) -> list[str]:
    """The tuned rates as YAML entries of optim.lr_table. Each belongs to its scale and context."""
    lines = []
    for one in optima.found:
        if one.is_tuned:
            lr, low, high = one.rate
            source = f"transfer, {one.n_seeds} seed" + "s" * (one.n_seeds != 1)
            if low is not None and high is not None:
                source += f", {low:.3g} to {high:.3g}"
            about = f"{one.architecture}, width {one.width:,}, {one.depth:,} layers, context {one.context:,}"
            found_for = f"model: {one.model}, optim: {one.optim}"
            lines.append(f'- {{tokens: {one.tokens}, lr: {lr:.3g}, {found_for}, source: "{source}"}}  # {about}')
    return ["entries for optim.lr_table:", *lines] if lines else []


def report_of(optima: Optima, axes: Sequence[Axis], within: float, commands: Iterable[str]) -> dict[str, Any]:
    """transfer.json: all numbers are finite or null."""
    return {
        "format": FORMAT,
        "metric": optima.metric,
        "confidence": optima.confidence,
        "within": within,
        "axes": [
            {
                "architecture": axis.architecture,
                "axis": axis.name,
                "at": axis.at,
                "sizes": [axis.size(one) for one in axis.points],
                **{name: getattr(axis.drift, name, None) for name in ("slope", "octaves", "low", "high")},
                "verdict": axis.drift.verdict if axis.drift else NOT_RESOLVED,
                "sentence": axis.sentence,
            }
            for axis in axes
        ],
        "optima": [_of_optimum(one) for one in optima.found],
        "left_out": left_out(optima),
        "commands": list(commands),
    }


def _of_optimum(one: Optimum) -> dict[str, Any]:
    sizes = {"architecture": one.architecture, "width": one.width, "depth": one.depth, "tokens": one.tokens}
    found = {"state": one.tuning.state, "best": one.tuning.best, "lr": one.tuning.optimum}
    ends = {"low": one.tuning.low, "high": one.tuning.high, "price_of_two": one.tuning.price_of_two}
    return {**sizes, **found, **ends, "seeds": one.n_seeds}


def write_report(report: dict[str, Any], axes: Sequence[Axis], out: Path) -> None:
    """transfer.json, and a figure as PNG and SVG."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FILE, report)
    if shown := [axis for axis in axes if axis.points]:
        write_picture(_chart(shown), Picture(), out, FIGURE)


def _chart(axes: Sequence[Axis]) -> Chart:
    """A plot for each name of an axis: best lr against size, with intervals and the fits."""
    named = {f"{axis.architecture}, {place_of(axis.at)}": axis for axis in axes}
    labels = {
        name: name + (f": {axis.drift.octaves:+.2f} octaves, {axis.drift.verdict}" if axis.drift else "")
        for name, axis in named.items()
    }
    plots = []
    for of in [of for of in AXES if any(axis.name == of for axis in axes)]:
        here = {name: axis for name, axis in named.items() if axis.name == of}
        sizes = sorted({axis.size(one) for axis in here.values() for one in axis.points})
        x = drawn.Axis(AXES[of], log=True, ticks={float(size): format_count(size) for size in sizes})
        marks = [mark for name, axis in here.items() for mark in _marks(name, axis)]
        plots.append(drawn.Plot(marks, [x], [drawn.Axis("best learning rate", log=True)], of))
    chart = drawn.Chart(FIGURE, "Best learning rate against size", "", plots, styles(named, next(iter(named))), labels)
    chart.choices.append(chart.choice_of_arms("Lines"))
    return chart


def _marks(name: str, axis: Axis) -> Iterator[Mark]:
    sizes, rates = [axis.size(one) for one in axis.points], [one.rate for one in axis.points]
    for size, (lr, low, high) in zip(sizes, rates, strict=True):
        yield Mark(name, [size, size], [lr if low is None else low, lr if high is None else high], line=1.5)
    yield Mark(name, sizes, [lr for lr, _, _ in rates], size=9)
    if axis.drift is not None:
        ends = [sizes[0], sizes[-1]]
        fit = [2 ** (axis.drift.intercept + axis.drift.slope * math.log2(size)) for size in ends]
        yield Mark(name, ends, fit, line=1.4)
