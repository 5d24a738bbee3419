"""analysis.json and analysis.parquet: every point of every curve, with all its digits."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.analysis.measures.of_run import Curve
from ngpt_train.analysis.paper_figures import FIGURES, Measured
from ngpt_train.core.files import write_atomically


def as_json(measured: Measured, runs: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """The content of analysis.json. Infinities and NaN are null. runs: a table with a row for each run.

    definition: the first paragraph of the measuring function's docstring.
    """
    figures = {}
    for name, curves in measured.curves.items():
        figure = FIGURES[name]
        panels: dict[str, Any] = {
            panel: {"title": of.title, "x": of.x, "y": of.y, "curves": []} for panel, of in figure.panels.items()
        }
        for run, found in curves.items():
            for curve in found:
                panels[curve.panel]["curves"].append(_curve(run, curve))
        definition = " ".join((figure.measure.__doc__ or "").split("\n\n")[0].split())
        shown = {panel: of for panel, of in panels.items() if of["curves"]}
        figures[name] = {"title": figure.title, "definition": definition, "panels": shown}
    skipped = [vars(each) for each in measured.skipped]
    return {"runs": list(runs), "figures": figures, "skipped": skipped, "command": command}


def _curve(run: str, curve: Curve) -> dict[str, Any]:
    found: dict[str, Any] = {"run": run, "name": curve.name, "x": _finite(curve.x), "y": _finite(curve.y)}
    return found if curve.edges is None else {**found, "edges": _finite(curve.edges)}


def _finite(values: Any) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Writes one line: with indents, each of a million numbers would have its own line."""
    write_atomically(path, (json.dumps(content, allow_nan=False) + "\n").encode())


def write_parquet(measured: Measured, path: Path) -> None:
    """Writes a row for each point: figure, panel, run, curve, x and y. x and y may be infinite or NaN."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    curves = [
        (figure, run, curve)
        for figure, of_figure in measured.curves.items()
        for run, found in of_figure.items()
        for curve in found
    ]
    lengths = [len(curve.x) for _, _, curve in curves]

    def column(values: list[str]) -> Any:
        return pa.array(np.repeat(np.array(values, dtype=object), lengths), pa.string())

    empty = [np.zeros(0)]
    table = pa.table(
        {
            "figure": column([figure for figure, _, _ in curves]),
            "panel": column([curve.panel for _, _, curve in curves]),
            "run": column([run for _, run, _ in curves]),
            "curve": column([curve.name for _, _, curve in curves]),
            "x": pa.array(np.concatenate([curve.x for _, _, curve in curves] or empty), pa.float64()),
            "y": pa.array(np.concatenate([curve.y for _, _, curve in curves] or empty), pa.float64()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_atomically(path, sink.getvalue().to_pybytes())
