"""probe.json: the losses of one or two models by class, and rows to read.

Sums of losses over classes add up to the validation loss to the last bit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.analysis.token_classes import Classes
from ngpt_train.core.constants import IGNORED
from ngpt_train.data.tokenizers.tokenizer import Ints

Losses = NDArray[np.float64]

MOST_DIFFERENT = 10  # tokens of a row that are listed


def report(
    models: Sequence[Mapping[str, Any]],
    losses: Mapping[str, Losses],
    rows: tuple[Ints, Ints],
    numbers: Ints,
    classes: Sequence[Classes],
    pieces: Sequence[str],
    n_shown: int,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of probe.json.

    models: facts of each model; `name` is its key in `losses` `(N, context)`. rows: tokens and targets `(N, context)`.
    numbers: of the rows in the split, `(N,)`. pieces: the text of each id. about: the first fields.
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
        "by_position": {
            "targets": counts.sum(axis=0).tolist(),
            "loss_sum": {name: of.sum(axis=0).tolist() for name, of in losses.items()},
        },
        "rows": [row_of(row, int(numbers[row]), losses, rows, pieces) for row in shown],
    }


def row_of(
    row: int, number: int, losses: Mapping[str, Losses], rows: tuple[Ints, Ints], pieces: Sequence[str]
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


def addable(losses: Losses) -> Losses:
    """The losses as multiples of a power of two, q; their sum is below 2^52 q. So no sum of any of them, in any order,
    rounds. q is as small as possible: a loss changes no more than a plain sum in fp64 would round."""
    _, exponent = math.frexp(float(losses.sum()) or 1.0)
    q = 2.0 ** (exponent - 52)
    return np.asarray(np.round(losses / q) * q)


def of_classes(classes: Classes, losses: Mapping[str, Losses], counts: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """For each class with targets: its name, the number of targets, and for each model the sum of losses in nats
    (`loss_sum`) and their mean (`loss`).

    losses: by model, `(N, context)`, from `addable`. counts: True for targets that count.
    """
    found = []
    n_classes = len(classes.names)
    labels = classes.labels[counts]
    n_targets = np.bincount(labels, minlength=n_classes)
    sums = {name: np.bincount(labels, of[counts], minlength=n_classes) for name, of in losses.items()}
    for index, name in enumerate(classes.names):
        if n_targets[index]:
            n = int(n_targets[index])
            loss_sum = {model: float(of[index]) for model, of in sums.items()}
            mean = {model: value / n for model, value in loss_sum.items()}
            found.append({"class": name, "targets": n, "loss_sum": loss_sum, "loss": mean})
    return found


def standing_out(losses: Sequence[Losses], counts: NDArray[np.bool_], n: int) -> list[int]:
    """The `n` rows with the largest difference per target between two models, or with one model the largest loss per
    target; the largest first. losses: 0 where a target does not count."""
    n_targets = np.maximum(counts.sum(axis=1), 1)
    means = [of.sum(axis=1) / n_targets for of in losses]
    size = means[0] if len(means) == 1 else np.abs(means[0] - means[1])
    return [int(row) for row in np.argsort(-size, kind="stable")[:n] if counts[row].any()]
