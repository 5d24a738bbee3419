"""The figures by name, with their panels and measures; and their curves for runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ngpt_train.analysis.measures import batch_statistics, gradient_norms, learned_vectors, live, matrices
from ngpt_train.analysis.measures.of_run import Curve, NoMeaning, OfRun

Measure = Callable[[OfRun], list[Curve]]
Together = Callable[[Mapping[str, list[Curve]]], dict[str, list[Curve]]]

LAYER, STEP, RANK = "layer", "step", "normalized rank"


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    log: bool = False  # the y axis


@dataclass(frozen=True)
class Figure:
    """measure: returns the curves of one run; raises NoMeaning. together: combines the curves of all runs, by run.

    needs: "weights"; "rows", also the run's own rows; "telemetry", its records alone. definition: by default the first
    paragraph of the measure's docstring.
    """

    title: str
    panels: Mapping[str, Panel]
    measure: Measure
    needs: str = "weights"
    together: Together | None = None
    definition: str = ""


def _embedding_panels() -> dict[str, Panel]:
    found = {}
    for which in ("input", "output", "source"):
        name = f"{which} embeddings"
        found[f"{which}_norms"] = Panel(f"Norms of {name}", RANK, "norm")
        found[f"{which}_eigenvalues"] = Panel(f"Eigenvalues of {name}", RANK, "eigenvalue / median", log=True)
        found[f"{which}_dot_products"] = Panel(f"Pairwise dot products of {name}", "dot product", "density")
    return found


MATRICES = {"wq": "Q", "wk": "K", "wv": "V", "w_u": "MLP11, W_u", "w_v": "MLP12, W_v", "w_down": "MLP2, W_down"}
CONDITION = {
    name: Panel(f"Condition number of {said}", LAYER, "condition number", log=True) for name, said in MATRICES.items()
}
LAYER_PANELS = {
    "wq_norms": Panel("Norms of the rows of Q", RANK, "norm"),
    "wq_singular_values": Panel("Singular values of the heads of Q", RANK, "singular value", log=True),
    "wk_norms": Panel("Norms of the rows of K", RANK, "norm"),
    "wk_singular_values": Panel("Singular values of the heads of K", RANK, "singular value", log=True),
}
RATES = {"alpha_attn": "alpha of attention", "alpha_mlp": "alpha of the MLP"}
SCALES = {"s_u": "s_u", "s_v": "s_v", "s_qk": "s_qk"}
OF_ENCODER_DECODERS = {
    "alpha_attn": "alpha of attention",
    "alpha_cross": "alpha of cross-attention",
    "alpha_mlp": "alpha of the MLP",
}
GRADIENTS = {
    "wq": "W_q",
    "wk": "W_k",
    "wv": "W_v",
    "wo": "W_o",
    "w_u": "W_u (FC1)",
    "w_v": "W_v of the MLP",
    "w_down": "W_down (FC2)",
}
ADDED = {"norm_ffn": "gain of the FFN LN", "norm_post_attn": "gain of the post-attention LN", "head_scale": "HeadScale"}


def _means(named: Mapping[str, str], x: str = LAYER, y: str = "mean") -> dict[str, Panel]:
    return {name: Panel(said, x, y) for name, said in named.items()}


def _statistics(title: str, names: Sequence[str], definition: str) -> Figure:
    panels = {}
    for name in names:
        said, y = name.replace("_squared", "^2"), "norm / d" if name.startswith("g_") else "distance / d"
        panels[name] = Panel(f"{said}, first norm", "batch", y)
        panels[f"{name}_mean"] = Panel(f"{said}, mean over batches", LAYER, y)
        panels[f"{name}_variance"] = Panel(f"{said}, variance over batches", LAYER, f"variance of {y}", log=True)
    measure = partial(batch_statistics.over_batches, names=names)
    return Figure(title, panels, measure, needs="rows", definition=definition)


def _live(title: str, panels: Mapping[str, Panel], measure: Measure, **more: Any) -> Figure:
    return Figure(title, panels, measure, needs="telemetry", **more)


def _distances(number: int, *symbols: str) -> Figure:
    panels = {symbol: Panel(f"{symbol} of a batch and running", STEP, "distance / d") for symbol in symbols}
    says = "dist(mu_B, mu) = ||mu_B - mu|| / d of each norm over steps, of sigma and psi alike."
    measure = partial(live.distances, symbols=symbols)
    return _live(f"PowerNorm, figure {number} over steps", panels, measure, definition=says)


def _rates_of_tnt(number: int, named: Mapping[str, str]) -> Figure:
    says = "The mean entry of each layer's vector in encoder and decoder, effective values, over steps."
    measure = partial(live.tnt, names=tuple(named))
    return _live(f"TnT, figure {number} over steps", _means(named, STEP), measure, definition=says)


DENSITY = {name: Panel(said, "value", "density") for name, said in {**RATES, **SCALES, "s_z": "s_z"}.items()}
FIGURES: dict[str, Figure] = {
    "ngpt_4": Figure("nGPT, figure 4: embeddings", _embedding_panels(), matrices.figure_4),
    "ngpt_5": Figure(
        "nGPT, figure 5: median condition numbers",
        CONDITION,
        matrices.medians,
        definition="nGPT, figure 5: sigma_max / sigma_min of each head's W_q, W_k and W_v `(d_head, d)`, and its "
        "median over the heads of a layer; of the MLP's W_u, W_v and W_down whole. fp64.",
    ),
    "ngpt_6": Figure(
        "nGPT, figure 6: eigen learning rates and scaling factors",
        {**_means(RATES, y="mean of |alpha|"), **_means(SCALES), "s_z": DENSITY["s_z"]},
        learned_vectors.figure_6,
        together=learned_vectors.histogram_of_s_z,
    ),
    "ngpt_10": Figure(
        "nGPT, figure 10: condition numbers, renormalized after training too", CONDITION, matrices.figure_10
    ),
    "ngpt_11": Figure(
        "nGPT, figure 11: row norms and singular values, layer 3",
        LAYER_PANELS,
        partial(matrices.of_one_layer, layer=2),
        definition="nGPT, figure 11: norms ||W_i|| of the rows of W_q and W_k of the third layer, `layers.2`, and the "
        "singular values of each of its heads, the largest first. fp64.",
    ),
    "ngpt_12": Figure(
        "nGPT, figure 12: row norms and singular values, layer 4",
        LAYER_PANELS,
        partial(matrices.of_one_layer, layer=3),
        definition="nGPT, figure 12: as figure 11, of the fourth layer, `layers.3`.",
    ),
    "ngpt_14": Figure(
        "nGPT, figure 14: histograms of alpha and s",
        DENSITY,
        learned_vectors.figure_14,
        together=learned_vectors.histograms,
    ),
    "normformer_3": Figure(
        "NormFormer, figure 3: L1 norm of gradients",
        {"w_down": Panel(GRADIENTS["w_down"], LAYER, "L1 norm", log=True)},
        gradient_norms.figure_3,
        needs="rows",
    ),
    "normformer_4": Figure(
        "NormFormer, figure 4: learned gains and head scales",
        _means(ADDED, y="value"),
        learned_vectors.normformer_figure_4,
    ),
    "normformer_6": Figure(
        "NormFormer, figure 6: lambda of residual connections",
        {"res_scale": Panel("lambda", "layer number / total layers", "mean")},
        learned_vectors.normformer_figure_6,
    ),
    "normformer_7": Figure(
        "NormFormer, figure 7: gradients as a ratio to those of the first run",
        {name: Panel(said, LAYER, "ratio of L1 norm / loss", log=True) for name, said in GRADIENTS.items()},
        gradient_norms.figure_7,
        needs="rows",
        together=gradient_norms.ratios_to_first,
    ),
    "powernorm_2": _statistics(
        "PowerNorm, figure 2: BatchNorm's statistics of batches and running ones",
        ("mu", "sigma_squared", "sigma"),
        "PowerNorm, figure 2: dist(mu_B, mu) = ||mu_B - mu|| / d and dist(sigma_B^2, sigma^2) of BatchNorm, and "
        "dist(sigma_B, sigma); of the first norm over the batches, and of each layer the mean and variance over them.",
    ),
    "powernorm_3": _statistics(
        "PowerNorm, figure 3: the terms of BatchNorm's gradient",
        ("g_mu", "g_sigma_squared"),
        "PowerNorm, figure 3: g_mu = ||gamma / (sigma_B B) sum_j dL/dy_j|| / d, and g_sigma^2 with dL/dy_j x_hat_j in "
        "the sum (eq. 3), of BatchNorm; L is the mean loss of the batch.",
    ),
    "powernorm_4": _statistics(
        "PowerNorm, figure 4: sigma and psi of batches and running, and their terms of the gradient",
        ("sigma", "psi", "sigma_squared", "psi_squared", "g_sigma_squared", "g_psi_squared"),
        "PowerNorm, figure 4: dist(sigma_B, sigma) and dist(psi_B, psi), ||x_B - x|| / d, and those of the squares; "
        "the gradient's terms g_sigma^2 (eq. 3) and g_psi^2 = ||gamma / (psi_B B) sum_j dL/dy_j x_hat_j|| / d (eq. 6).",
    ),
    "powernorm_6": Figure(
        "PowerNorm, figure 6: singular values of embeddings",
        {
            which: Panel(f"{which} embedding", RANK, "singular value / largest", log=True)
            for which in ("input", "output", "source")
        },
        matrices.powernorm_figure_6,
    ),
    "tnt_3": Figure(
        "TnT, figure 3: eigen learning rates",
        _means(OF_ENCODER_DECODERS, y="mean of |alpha|"),
        partial(learned_vectors.tnt, names=tuple(OF_ENCODER_DECODERS)),
        definition="TnT, figure 3: the mean of |alpha| of attention, cross-attention and MLP at each layer of encoder "
        "and decoder.",
    ),
    "tnt_4": Figure(
        "TnT, figure 4: scaling factors",
        _means({"s_qk": "s_qk", "s_qk_cross": "s_qk of cross-attention", "s_u": "s_u", "s_v": "s_v"}),
        partial(learned_vectors.tnt, names=("s_qk", "s_u", "s_v")),
        definition="TnT, figure 4: the mean of s_qk, s_u and s_v at each layer of encoder and decoder.",
    ),
    "ngpt_6_live": _live("nGPT, figure 6 over steps", _means({**RATES, **SCALES, "s_z": "s_z"}, STEP), live.figure_6),
    "normformer_3_live": _live(
        "NormFormer, figure 3 over steps",
        {"w_down": Panel(GRADIENTS["w_down"], STEP, "L1 norm", log=True)},
        live.normformer_3,
    ),
    "normformer_4_live": _live("NormFormer, figure 4 over steps", _means(ADDED, STEP, "value"), live.normformer_4),
    "normformer_6_live": _live(
        "NormFormer, figure 6 over steps",
        {"res_scale": Panel("lambda", STEP, "mean")},
        partial(live.of_vectors, names=("res_scale",)),
        definition="The mean entry of each layer's vector, effective values, over steps.",
    ),
    "normformer_7_live": _live(
        "NormFormer, figure 7 over steps: gradients as a ratio to those of the first run",
        {name: Panel(said, STEP, "ratio of L1 norm / loss", log=True) for name, said in GRADIENTS.items()},
        live.normformer_7,
        together=gradient_norms.ratios_to_first,
    ),
    "powernorm_2_live": _distances(2, "mu", "sigma"),
    "powernorm_4_live": _distances(4, "sigma", "psi"),
    "tnt_3_live": _rates_of_tnt(3, OF_ENCODER_DECODERS),
    "tnt_4_live": _rates_of_tnt(4, SCALES),
}


def chosen(words: Sequence[str]) -> list[str]:
    """The figures in analyze.figures, in the order of FIGURES."""
    live_ones = {name for name in FIGURES if name.endswith("_live")}
    groups = {"all": set(FIGURES), "live": live_ones}
    wanted = {name for word in words for name in groups.get(word, {word})}
    return [name for name in FIGURES if name in wanted]


@dataclass(frozen=True)
class Skipped:
    figure: str
    run: str
    why: str  # the end of a sentence about the run


@dataclass
class Measured:
    """curves: by figure and run."""

    curves: dict[str, dict[str, list[Curve]]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


def measure(runs: Iterable[OfRun], names: Sequence[str]) -> Measured:
    """The figures `names` of the runs. `runs` yields one run after the other, so only one needs to be in memory."""
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
