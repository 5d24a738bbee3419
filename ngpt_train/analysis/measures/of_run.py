"""The input of a measure, OfRun, and its result, Curves."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig

Values = NDArray[np.float64]


class NoMeaning(Exception):
    """A figure has no meaning, or no numbers, for a run. The message is the end of a sentence about the run."""


@dataclass(frozen=True)
class Curve:
    """A curve in a panel of a figure. x, y: `(n,)`."""

    panel: str
    name: str  # within its panel and run, such as `median` or `head 3`; may be empty
    x: Values
    y: Values
    kind: str = "line"  # line, dotted or points
    edges: Values | None = None  # of a histogram: the ends of its bins, `(n + 1,)`


@dataclass(frozen=True, eq=False)  # by identity, so that figures of a run can share a cached measure
class OfRun:
    """The data of one run for its figures.

    weights: by canonical name, vectors as stored, matrices as the model uses them. in_use: vectors as the model uses
    them, such as nGPT's effective alpha. gradient_l1, loss, batches: of the run's own rows; None if they were not asked
    for, or cannot be had for the reason `no_rows`. telemetry, train: records of metrics.jsonl.
    """

    name: str
    model: ModelConfig
    on_sphere: bool = False  # training keeps the rows of matrices on the sphere
    over_batch: bool = False  # the model has norms over the batch
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    in_use: Mapping[str, Tensor] = field(default_factory=dict)
    gradient_l1: Mapping[str, float] | None = None
    loss: float | None = None
    batches: Sequence[Mapping[str, Mapping[str, float]]] | None = None  # see `batch_statistics.batch_gaps`
    no_rows: str = ""
    telemetry: Sequence[Mapping[str, Any]] = ()
    train: Sequence[Mapping[str, Any]] = ()


# The stacks of blocks by the first word of a weight's name, and cross-attention within the decoder.
_PLACE = re.compile(r"(layers|encoder)\.(\d+)\.(cross\.)?(.+)")
ENCODER, DECODER, CROSS = "encoder", "decoder", "cross-attention"


def by_layer(named: Mapping[str, Any], name: str) -> dict[str, dict[int, Any]]:
    """The values of `named` under `layers.{i}.NAME`, by stack and layer, in order. A decoder has one stack, with an
    empty name. An encoder-decoder has three: `encoder.{i}.NAME`, `layers.{i}.NAME` and `layers.{i}.cross.NAME`."""
    decoder = DECODER if any(path.startswith("encoder.") for path in named) else ""
    found: dict[str, dict[int, Any]] = {ENCODER: {}, decoder: {}, CROSS: {}}
    for path, value in named.items():
        place = _PLACE.fullmatch(path)
        if place and place[4] == name:
            stack = ENCODER if place[1] == "encoder" else CROSS if place[3] else decoder
            found[stack][int(place[2])] = value
    return {stack: dict(sorted(layers.items())) for stack, layers in found.items() if layers}


def named_curve(stack: str, name: str) -> str:
    """The name of a curve of a stack: `encoder median`."""
    return f"{stack} {name}".strip()


def layer_curves(
    named: Mapping[str, Any], name: str, number: Callable[[Any], float], said: str = "", kind: str = "line"
) -> list[Curve]:
    """A curve for each stack: number(value) for the value under `layers.{i}.NAME`, over the layers i."""
    return [
        Curve(
            name, named_curve(stack, said), as_values(list(layers)), as_values(list(map(number, layers.values()))), kind
        )
        for stack, layers in by_layer(named, name).items()
    ]


def some(curves: Iterable[Curve], otherwise: str) -> list[Curve]:
    """The curves; raises NoMeaning(otherwise) if there are none."""
    found = list(curves)
    if not found:
        raise NoMeaning(otherwise)
    return found


def as_values(values: Any) -> Values:
    """Numbers, or a tensor, as fp64."""
    return np.asarray(values.detach().double().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)


def zipped(points: Sequence[tuple[float, float]]) -> tuple[Values, Values]:
    """x and y of points."""
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return x, y


def over_ranks(values: Tensor) -> tuple[Values, Values]:
    """Values sorted, the largest first, over their normalised rank: i / (n - 1) for the i-th from 0."""
    sorted_values = values.double().sort(descending=True).values
    return np.linspace(0, 1, len(sorted_values)), as_values(sorted_values)
