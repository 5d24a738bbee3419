"""The loss of a model at a context, and at each position of its window: figure 13 of the nGPT paper.

A document is read after an eos, as in training. Its ids are the targets; the eos at its end is not.

The first window has the first `context` targets. Each later window moves by `stride`, and its last `stride` targets
count for the context, so each of them is predicted from at least `context - stride` ids. The last window ends with the
document. The position of a target is the number of ids before it in its window, less one. At the positions all targets
of all windows count.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.data.tokenizers.tokenizer import Tokenizer, encode_document
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.validation import CHUNK_TOKENS, not_training
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.layers.rope import UNSCALED, RopeScaling

STYLES = {"none": ("-", "C0"), "linear": ("--", "C1"), "ntk": (":", "C2")}  # line and colour by `rope`


class Window(NamedTuple):
    """The targets `start` to `end - 1` of a document. The context counts them from `new` on."""

    start: int
    new: int
    end: int


def windows(n_targets: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of a document of n_targets ids; all have the same length."""
    end = min(context, n_targets)
    yield Window(0, 0, end)
    while end < n_targets:
        new, end = end, min(end + stride, n_targets)
        yield Window(end - context, new, end)


@dataclass
class Curve:
    """Sums at one context. rope: none, linear or ntk, with its factor. nats, targets, bytes: of the targets that count
    for the context.

    by_position: (3, context) fp64, at each position the nats, the number and the bytes of all targets. shorter: the
    number of documents with fewer targets than the context.
    """

    context: int
    stride: int
    rope: str
    factor: float
    nats: float = 0.0
    targets: int = 0
    bytes: int = 0
    windows: int = 0
    documents: int = 0
    shorter: int = 0
    by_position: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 0)))

    def as_json(self) -> dict[str, Any]:
        kept = ("context", "stride", "rope", "factor", "windows", "documents", "shorter")
        return {
            **{name: getattr(self, name) for name in kept},
            **losses(self.nats, self.targets, self.bytes),
            "positions": [
                {"first": first, "last": last - 1, **losses(*self.by_position[:, first:last].sum(axis=1).tolist())}
                for first, last in bins(self.context)
            ],
        }


def losses(nats: float, targets: float, n_bytes: float) -> dict[str, Any]:
    """loss in nats per target, ppl = exp(loss), bits_per_byte = nats / ln 2 / bytes; None without targets or bytes."""
    loss = nats / targets if targets else None
    return {
        "targets": int(targets),
        "loss": loss,
        "ppl": None if loss is None else math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / n_bytes if n_bytes else None,
    }


def bins(context: int) -> list[tuple[int, int]]:
    """Ranges of positions: 0, 1, 2 to 3, 4 to 7, ... up to the context."""
    ends = [1 << k for k in range(context.bit_length()) if 1 << k < context]
    return list(zip([0, *ends], [*ends, context], strict=True))


def scaling_of(rope: str, context: int, trained: int) -> RopeScaling:
    """RoPE's scaling for a row of `context` tokens, after training on `trained` tokens; none for a row within them."""
    factor = max(1.0, context / trained)
    return {"none": UNSCALED, "linear": RopeScaling(linear=factor), "ntk": RopeScaling(ntk=factor)}[rope]


@torch.no_grad()
def measure(
    model: Decoder, tokenizer: Tokenizer, documents: Iterable[str], plan: Iterable[tuple[int, int, str]], world: World
) -> list[Curve]:
    """The curves of `plan`, (context, stride, rope) each; the same on every rank. A collective call.

    Documents are read one by one, and logits are never held whole: memory grows with the longest document's ids and the
    longest context's activations. The ranks share the windows.
    """
    trained = model.config.context
    curves = [Curve(context, stride, rope, max(scaling_of(rope, context, trained))) for context, stride, rope in plan]
    sums = [torch.zeros(3, curve.context, dtype=torch.float64, device=world.device) for curve in curves]
    counted = torch.zeros(len(curves), 4, dtype=torch.float64, device=world.device)  # nats, targets, bytes, windows
    n_bytes = torch.from_numpy(tokenizer.n_bytes).to(world.device)
    passes = 0
    with not_training(model, world):
        for text in documents:
            # eos and the ids of the document: (1 + targets,)
            opened = np.concatenate([[tokenizer.eos], encode_document(tokenizer, text)]).astype(np.int64)
            ids = torch.from_numpy(opened).to(world.device)
            n_targets = len(ids) - 1
            for k, curve in enumerate(curves if n_targets else []):
                curve.documents += 1
                curve.shorter += n_targets < curve.context
                cut = list(windows(n_targets, curve.context, curve.stride))
                at_once = max(1, CHUNK_TOKENS // (cut[0].end - cut[0].start))
                model.rope_scaling = scaling_of(curve.rope, curve.context, trained)
                for first in range(0, len(cut), at_once):
                    passes += 1
                    if passes % world.size == world.rank:
                        _add(model, ids, cut[first : first + at_once], n_bytes, sums[k], counted[k])
    model.rope_scaling = UNSCALED
    for curve, of_positions, of_context in zip(curves, sums, world.sum_(counted).tolist(), strict=True):
        curve.nats = of_context[0]
        curve.targets, curve.bytes, curve.windows = map(round, of_context[1:])
        curve.by_position = world.sum_(of_positions).cpu().numpy()
    return curves


def _add(model: Decoder, ids: Tensor, cut: list[Window], n_bytes: Tensor, sums: Tensor, counted: Tensor) -> None:
    """Adds the losses of windows of one length to `sums` (3, context), by position, and to `counted` (4,).

    ids: (1 + targets,); the first one is the eos.
    """
    rows = torch.stack([ids[window.start : window.end + 1] for window in cut])  # (B, T + 1)
    targets = rows[:, 1:]
    nats = model(rows[:, :-1], targets).by_token.double()  # (B, T)
    per_target = torch.stack([nats, torch.ones_like(nats), n_bytes[targets].double()])  # (3, B, T)
    sums[:, : targets.shape[1]] += per_target.sum(1)
    for row, window in enumerate(cut):
        counted[:3] += per_target[:, row, window.new - window.start :].sum(1)
    counted[3] += len(cut)


def plot_lengths(curves: Sequence[Curve], trained: int, title: str, path: Path) -> None:
    """Draws perplexity over the context (figure 13 of the nGPT paper) and over positions; a line marks `trained`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for rope in dict.fromkeys(curve.rope for curve in curves):
        of_rope = [curve.as_json() for curve in curves if curve.rope == rope]
        contexts, ppl = ([curve[name] for curve in of_rope] for name in ("context", "ppl"))
        style, color = STYLES[rope]
        angles = "RoPE as trained" if rope == "none" else f"RoPE scaled: {rope}"
        left.plot(contexts, ppl, "o", ls=style, color=color, label=angles)
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
