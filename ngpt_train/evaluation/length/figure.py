"""Draws the loss by context and by position."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ngpt_train.evaluation.length.curves import Curve

STYLES = {"none": ("-", "C0"), "linear": ("--", "C1"), "ntk": (":", "C2")}


def plot_lengths(curves: Sequence[Curve], trained: int, title: str, path: Path) -> None:
    """Writes a picture: left the perplexity over the context, as figure 13 of the nGPT paper, right over the position
    at each context. trained: model.context, at which a line stands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for rope in dict.fromkeys(curve.rope for curve in curves):
        of_rope = [curve.as_json() for curve in curves if curve.rope == rope]
        contexts = [curve["context"] for curve in of_rope]
        name = {"none": "RoPE as trained"}.get(rope, f"RoPE scaled: {rope}")
        style, color = STYLES[rope]
        left.plot(contexts, [curve["ppl"] for curve in of_rope], "o", ls=style, color=color, label=name)
        for k, curve in enumerate(of_rope):
            known = [p for p in curve["positions"] if p["ppl"] is not None]
            middle = [np.sqrt((p["first"] + 1) * (p["last"] + 1)) for p in known]
            label = f"context {curve['context']:,}" if rope == curves[0].rope else None
            right.plot(middle, [p["ppl"] for p in known], ls=style, marker=".", color=f"C{k}", label=label)
    for ax, what in ((left, "context"), (right, "position in the window")):
        ax.axvline(trained, color="0.6", lw=1, label=f"context of training, {trained:,}" if ax is left else None)
        ax.set(xscale="log", yscale="log", xlabel=f"{what} (tokens)", ylabel="perplexity per token")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:.4g}")
        ax.grid(alpha=0.3, which="both")
        ax.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path)
