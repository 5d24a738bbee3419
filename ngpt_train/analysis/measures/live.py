"""Figures over steps, from the telemetry records of runs (docs/telemetry.md), while they train or after."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ngpt_train.analysis.measures.batch_statistics import KINDS
from ngpt_train.analysis.measures.gradient_norms import PARAMETERS, SECOND
from ngpt_train.analysis.measures.learned_vectors import ADDED, RATES, SCALES
from ngpt_train.analysis.measures.of_run import Curve, NoMeaning, OfRun, by_layer, named_curve, some, zipped


def over_steps(records: Iterable[Mapping[str, Any]], name: str, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Steps and the number `name`, times `factor`, of the records that have it."""
    return zipped([(r["step"], factor * r[name]) for r in records if isinstance(r.get(name), (int, float))])


def of_layers(
    run: OfRun, statistic: str, name: str, panel: str, said: str = "", factor: float = 1.0
) -> Iterator[Curve]:
    """A curve for each layer: `STATISTIC/layers.{i}.NAME` of the records over steps."""
    prefix = f"{statistic}/"
    places = {key.removeprefix(prefix): key for record in run.telemetry for key in record if key.startswith(prefix)}
    for stack, layers in by_layer(places, name).items():
        for layer, key in layers.items():
            steps, values = over_steps(run.telemetry, key, factor)
            if len(steps):
                yield Curve(panel, named_curve(stack, f"layer {layer} {said}"), steps, values)


def found_in(run: OfRun, curves: Iterable[Curve], of_what: str) -> list[Curve]:
    if not run.telemetry:
        raise NoMeaning("has no telemetry records; train with logging.telemetry=100")
    return some(curves, f"has no {of_what} in its telemetry records")


def of_vectors(run: OfRun, names: Sequence[str]) -> list[Curve]:
    """The mean entry of vectors in use, at each layer."""
    curves = (curve for name in names for curve in of_layers(run, "value_mean", name, name))
    return found_in(run, curves, ", ".join(names))


def figure_6(run: OfRun) -> list[Curve]:
    """nGPT, figure 6 over steps: the mean of alpha, s_u, s_v and s_qk of each layer, and of s_z."""
    curves = [curve for name in (*RATES, *SCALES) for curve in of_layers(run, "value_mean", name, name)]
    steps, values = over_steps(run.telemetry, "value_mean/s_z")
    if len(steps):
        curves.append(Curve("s_z", "", steps, values))
    return found_in(run, curves, "eigen learning rates")


def tnt(run: OfRun, names: Sequence[str]) -> list[Curve]:
    """As `of_vectors`, for encoder-decoders alone."""
    found = of_vectors(run, names)
    if not any(curve.name.startswith("encoder") for curve in found):
        raise NoMeaning("has no encoder")
    return found


def normformer_3(run: OfRun) -> list[Curve]:
    """NormFormer, figure 3 over steps: ||g||_1 of W_down of each layer, before clipping."""
    return found_in(run, of_layers(run, "grad_l1", SECOND, SECOND), "gradients")


def normformer_7(run: OfRun) -> list[Curve]:
    """||g||_1 / L of each weight and layer, L the loss of the step; `ratios_to_first` divides by the baseline's.

    Steps without a train record have no loss, and are left out.
    """
    losses = {r["step"]: r["loss"] for r in run.train if isinstance(r.get("loss"), (int, float)) and r["loss"]}
    found = []
    for curve in (curve for name in PARAMETERS for curve in of_layers(run, "grad_l1", name, name)):
        known = np.array([step in losses for step in curve.x], dtype=bool)
        x = curve.x[known]
        if len(x):
            found.append(Curve(curve.panel, curve.name, x, curve.y[known] / np.array([losses[step] for step in x])))
    return found_in(run, found, "gradients at steps with a train record")


def normformer_4(run: OfRun) -> list[Curve]:
    """NormFormer, figure 4 over steps: least, mean and largest entry of each layer's vectors."""
    curves = (
        curve
        for name in ADDED
        for statistic, said in (("value_min", "least"), ("value_mean", "mean"), ("value_max", "largest"))
        for curve in of_layers(run, statistic, name, name, said)
    )
    return found_in(run, curves, "additions of NormFormer")


def distances(run: OfRun, symbols: Sequence[str]) -> list[Curve]:
    """PowerNorm, figures 2 and 4 over steps: dist(mu_B, mu) = ||mu_B - mu|| / d of each norm, before the batch moves
    mu, the mean over the step's micro batches."""
    curves = (
        curve
        for symbol in symbols
        for kind in KINDS
        for curve in of_layers(run, f"{symbol}_distance", kind, symbol, kind, 1 / run.model.d_model)
    )
    return found_in(run, curves, f"distances of {' or '.join(symbols)}")
