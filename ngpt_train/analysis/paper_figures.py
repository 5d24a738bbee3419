"""The figures by name, with their panels and measures; and their curves for runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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

    needs: "weights"; "rows", also the run's own rows; "telemetry", its records alone.
    """

    title: str
    panels: Mapping[str, Panel]
    measure: Measure
    needs: str = "weights"
    together: Together | None = None


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
    f"{name}_{what}": Panel(f"{title} {MATRICES[name]}", RANK, y, log)
    for name in ("wq", "wk")
    for what, title, y, log in (
        ("norms", "Norms of the rows of", "norm", False),
        ("singular_values", "Singular values of the heads of", "singular value", True),
    )
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


def _of_statistics(*names: str) -> dict[str, Panel]:
    found = {}
    for name in names:
        said, y = name.replace("_squared", "^2"), "norm / d" if name.startswith("g_") else "distance / d"
        found[name] = Panel(f"{said}, first norm", "batch", y)
        found[f"{name}_mean"] = Panel(f"{said}, mean over batches", LAYER, y)
        found[f"{name}_variance"] = Panel(f"{said}, variance over batches", LAYER, f"variance of {y}", log=True)
    return found


def _distances(*names: str) -> dict[str, Panel]:
    return {name: Panel(f"{name} of a batch and running", STEP, "distance / d") for name in names}


def _live(title: str, panels: Mapping[str, Panel], measure: Measure, together: Together | None = None) -> Figure:
    return Figure(title, panels, measure, needs="telemetry", together=together)


DENSITY = {name: Panel(said, "value", "density") for name, said in {**RATES, **SCALES, "s_z": "s_z"}.items()}
FIGURES: dict[str, Figure] = {
    "ngpt_4": Figure("nGPT, figure 4: embeddings", _embedding_panels(), matrices.figure_4),
    "ngpt_5": Figure("nGPT, figure 5: median condition numbers", CONDITION, matrices.figure_5),
    "ngpt_6": Figure(
        "nGPT, figure 6: eigen learning rates and scaling factors",
        {**_means(RATES, y="mean of |alpha|"), **_means(SCALES), "s_z": DENSITY["s_z"]},
        learned_vectors.figure_6,
        together=learned_vectors.histogram_of_s_z,
    ),
    "ngpt_10": Figure(
        "nGPT, figure 10: condition numbers, renormalized after training too", CONDITION, matrices.figure_10
    ),
    "ngpt_11": Figure("nGPT, figure 11: row norms and singular values, layer 3", LAYER_PANELS, matrices.figure_11),
    "ngpt_12": Figure("nGPT, figure 12: row norms and singular values, layer 4", LAYER_PANELS, matrices.figure_12),
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
    "powernorm_2": Figure(
        "PowerNorm, figure 2: BatchNorm's statistics of batches and running ones",
        _of_statistics("mu", "sigma_squared", "sigma"),
        batch_statistics.figure_2,
        needs="rows",
    ),
    "powernorm_3": Figure(
        "PowerNorm, figure 3: the terms of BatchNorm's gradient",
        _of_statistics("g_mu", "g_sigma_squared"),
        batch_statistics.figure_3,
        needs="rows",
    ),
    "powernorm_4": Figure(
        "PowerNorm, figure 4: sigma and psi of batches and running, and their terms of the gradient",
        _of_statistics("sigma", "psi", "sigma_squared", "psi_squared", "g_sigma_squared", "g_psi_squared"),
        batch_statistics.figure_4,
        needs="rows",
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
        learned_vectors.tnt_figure_3,
    ),
    "tnt_4": Figure(
        "TnT, figure 4: scaling factors",
        _means({"s_qk": "s_qk", "s_qk_cross": "s_qk of cross-attention", "s_u": "s_u", "s_v": "s_v"}),
        learned_vectors.tnt_figure_4,
    ),
    "ngpt_6_live": _live("nGPT, figure 6 over steps", _means({**RATES, **SCALES, "s_z": "s_z"}, STEP), live.figure_6),
    "normformer_3_live": _live(
        "NormFormer, figure 3 over steps",
        {"w_down": Panel(GRADIENTS["w_down"], STEP, "L1 norm", log=True)},
        live.normformer_3,
    ),
    "normformer_4_live": _live("NormFormer, figure 4 over steps", _means(ADDED, STEP, "value"), live.normformer_4),
    "normformer_6_live": _live(
        "NormFormer, figure 6 over steps", {"res_scale": Panel("lambda", STEP, "mean")}, live.of_vectors("res_scale")
    ),
    "normformer_7_live": _live(
        "NormFormer, figure 7 over steps: gradients as a ratio to those of the first run",
        {name: Panel(said, STEP, "ratio of L1 norm / loss", log=True) for name, said in GRADIENTS.items()},
        live.normformer_7,
        together=gradient_norms.ratios_to_first,
    ),
    "powernorm_2_live": _live(
        "PowerNorm, figure 2 over steps", _distances("mu", "sigma"), live.distances("mu", "sigma")
    ),
    "powernorm_4_live": _live(
        "PowerNorm, figure 4 over steps", _distances("sigma", "psi"), live.distances("sigma", "psi")
    ),
    "tnt_3_live": _live("TnT, figure 3 over steps", _means(OF_ENCODER_DECODERS, STEP), live.tnt(*OF_ENCODER_DECODERS)),
    "tnt_4_live": _live("TnT, figure 4 over steps", _means(SCALES, STEP), live.tnt(*SCALES)),
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
