"""Learned vectors: nGPT's figures 6 and 14, NormFormer's 4 and 6, TnT's 3 and 4."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ngpt_train.analysis.measures.of_run import (
    CROSS,
    DECODER,
    Curve,
    NoMeaning,
    OfRun,
    Values,
    as_values,
    by_layer,
    layer_curves,
    named_curve,
    some,
)

BINS = 100  # of a histogram, over the values of all runs
RATES = ("alpha_attn", "alpha_mlp")
SCALES = ("s_u", "s_v", "s_qk")
ADDED = ("norm_ffn", "norm_post_attn", "head_scale")
QUARTERS = {"least": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "largest": 1.0}


def means(named: Mapping[str, Tensor], name: str, said: str = "", kind: str = "line") -> list[Curve]:
    """The mean entry of the vector `name` at each layer; for alpha the mean of |alpha_i|, because the model uses the
    absolute value. s_v comes without the constant factor sqrt(d_model) of eq. 21."""

    def mean(vector: Tensor) -> float:
        return float((vector.double().abs() if name.startswith("alpha") else vector.double()).mean())

    return layer_curves(named, name, mean, said, kind)


def figure_6(run: OfRun) -> list[Curve]:
    """nGPT, figure 6: the mean of |alpha|, s_u, s_v and s_qk at each layer, and all of s_z; effective values, stored *
    init / scale (section 2.5)."""
    curves = [curve for name in (*RATES, *SCALES) for curve in means(run.in_use, name)]
    if not curves or "s_z" not in run.in_use:
        raise NoMeaning("has no eigen learning rates and scaling factors")
    return [*curves, values_of(run, "s_z")]


def values_of(run: OfRun, name: str) -> Curve:
    """All effective entries of the vectors `name` in all layers and stacks, as y; `histograms` counts them."""
    vectors = [vector for path, vector in run.in_use.items() if path == name or path.endswith(f".{name}")]
    values = np.concatenate([np.abs(as_values(v)) if name.startswith("alpha") else as_values(v) for v in vectors])
    return Curve(name, "", np.arange(len(values), dtype=np.float64), values)


def figure_14(run: OfRun) -> list[Curve]:
    """nGPT, figure 14: the effective entries of |alpha_A|, |alpha_M|, s_qk, s_u, s_v of all layers, and of s_z."""
    there = {path.split(".")[-1] for path in run.in_use}
    names = (*RATES, "s_qk", "s_u", "s_v", "s_z")
    curves = (values_of(run, name) for name in names if name in there)
    return some(curves, "has no eigen learning rates and scaling factors")


def histograms(curves: Mapping[str, list[Curve]]) -> dict[str, list[Curve]]:
    """Replaces values by their density, for each run: the share of its entries in a bin divided by the bin's width. A
    panel has the same BINS equal bins for all runs, from the least to the largest value of any run."""
    panels = {curve.panel for found in curves.values() for curve in found}
    edges: dict[str, Values] = {}
    for panel in panels:
        values = np.concatenate([curve.y for found in curves.values() for curve in found if curve.panel == panel])
        low, high = float(values.min()), float(values.max())
        margin = 0.0 if high > low else 0.5 * max(abs(low), 1e-12)  # all entries are equal: a fixed scale
        edges[panel] = np.linspace(low - margin, high + margin, BINS + 1)
    return {run: [_density(curve, edges[curve.panel]) for curve in found] for run, found in curves.items()}


def histogram_of_s_z(curves: Mapping[str, list[Curve]]) -> dict[str, list[Curve]]:
    """Figure 6 with a histogram of s_z instead of its entries."""
    counted = histograms({run: [c for c in found if c.panel == "s_z"] for run, found in curves.items()})
    return {run: [*(c for c in found if c.panel != "s_z"), *counted[run]] for run, found in curves.items()}


def _density(curve: Curve, edges: Values) -> Curve:
    counts = np.histogram(curve.y, edges)[0]
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    return Curve(curve.panel, curve.name, middle, counts / counts.sum() / width, edges=edges)


def tnt(run: OfRun, names: Sequence[str]) -> list[Curve]:
    """Means of vectors at each layer of encoder and decoder, effective and as stored. The paper's values of alpha, 0.02
    to 0.27 around 1 / sqrt(d_model) = 0.03, look like stored values; effective values are stored * init / scale."""
    if not any(path.startswith("encoder.") for path in run.in_use) or not by_layer(run.in_use, "alpha_attn"):
        raise NoMeaning("is no encoder-decoder with eigen learning rates and scaling factors")
    curves = []
    for name in names:
        for said, kind, named in (("effective", "line", run.in_use), ("stored", "dotted", run.weights)):
            for curve in means(named, name, said, kind):
                of_cross = replace(curve, panel="s_qk_cross", name=f"{DECODER} {said}")
                curves.append(of_cross if curve.name.startswith(CROSS) else curve)
    return curves


def normformer_figure_4(run: OfRun) -> list[Curve]:
    """NormFormer, figure 4: how the entries of three learned vectors are distributed at each layer: the gains of the
    LayerNorm in the MLP and of that after attention, and gamma of HeadScale. Quantiles, linear between entries."""
    curves = []
    for name in ADDED:
        for stack, layers in by_layer(run.in_use, name).items():
            quantiles = np.array([np.quantile(as_values(v), list(QUARTERS.values())) for v in layers.values()])
            for said, values in zip(QUARTERS, quantiles.T, strict=True):
                kind = "line" if said == "median" else "dotted"
                curves.append(Curve(name, named_curve(stack, said), as_values(list(layers)), values, kind=kind))
    return some(curves, "has none of NormFormer's three additions")


def normformer_figure_6(run: OfRun) -> list[Curve]:
    """NormFormer, figure 6: the mean of lambda_resid at each layer. x is the depth, layer number / total layers."""
    curves = (replace(curve, x=curve.x / (curve.x.max() + 1)) for curve in means(run.in_use, "res_scale"))
    return some(curves, "has no lambda of residual connections (model.res_scale)")
