"""probe.json: the losses of one or two models by class, and rows to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.analysis.probe.classes import Classes
from ngpt_train.analysis.probe.sums import Losses, addable, by_position, of_classes, standing_out
from ngpt_train.core.constants import IGNORED

MOST_DIFFERENT = 10  # tokens of a row that are listed


def report(
    models: Sequence[Mapping[str, Any]],
    losses: Mapping[str, Losses],
    rows: tuple[NDArray[np.int64], NDArray[np.int64]],
    numbers: NDArray[np.int64],
    classes: Sequence[Classes],
    pieces: Sequence[str],
    n_shown: int,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of probe.json.

    models: what is said of each; `name` is its key in `losses` `(N, context)`. rows: tokens and targets `(N, context)`.
    numbers: those of the rows in the split, `(N,)`. pieces: the text of each id. about: what else it begins with.
    """
    _, targets = rows
    counts = targets != IGNORED
    losses = {name: addable(np.where(counts, of, 0)) for name, of in losses.items()}
    n_targets = int(counts.sum())
    found = []
    for model in models:
        loss_sum = float(losses[model["name"]].sum())
        found.append({**model, "targets": n_targets, "loss_sum": loss_sum, "loss": loss_sum / n_targets})
    shown = standing_out(list(losses.values()), counts, n_shown)
    return {
        **about,
        "models": found,
        "classes": [
            {"kind": each.kind, "says": each.says, "classes": of_classes(each, losses, counts)} for each in classes
        ],
        "by_position": by_position(losses, counts),
        "rows": [row_of(row, int(numbers[row]), losses, rows, pieces) for row in shown],
    }


def row_of(
    row: int,
    number: int,
    losses: Mapping[str, Losses],
    rows: tuple[NDArray[np.int64], NDArray[np.int64]],
    pieces: Sequence[str],
) -> dict[str, Any]:
    """One row: its text, the loss of each target, and the targets where the models differ most (of one model, those
    with the largest losses)."""
    tokens, targets = rows[0][row], rows[1][row]
    positions = np.flatnonzero(targets != IGNORED)
    of = {name: values[row, positions] for name, values in losses.items()}
    first, *others = of.values()
    size = np.abs(first - others[0]) if others else first
    tokens_said = [
        {
            "position": int(position),
            "text": pieces[targets[position]],
            "loss": {name: float(values[index]) for name, values in of.items()},
        }
        for index, position in enumerate(positions)
    ]
    most = sorted(range(len(positions)), key=lambda index: -size[index])[:MOST_DIFFERENT]
    return {
        "row": row,
        "number": number,
        "loss": {name: float(values.sum()) / len(positions) for name, values in of.items()},
        "loss_sum": {name: float(values.sum()) for name, values in of.items()},
        "given": "".join(pieces[i] for i in tokens[: positions[0] + 1]),
        "text": "".join(pieces[i] for i in targets[positions]),
        "tokens": tokens_said,
        "most": [tokens_said[index] for index in most],
    }
