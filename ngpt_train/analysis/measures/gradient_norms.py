"""Gradients of the loss of a run's own rows: NormFormer's figures 3 and 7."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ngpt_train.analysis.measures.of_run import Curve, NoMeaning, OfRun, layer_curves
from ngpt_train.core.constants import IGNORED
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.weights import export_gradients

SECOND = "w_down"  # the second fully connected weight of the MLP
PARAMETERS = ("wq", "wk", "wv", "wo", "w_u", "w_v", "w_down")


def gradient_l1(model: Decoder, batches: Sequence[Sequence[Tensor]]) -> tuple[dict[str, float], float]:
    """||g||_1 = sum of |g_ij| for each weight by canonical name, fp64, and the loss. g is the gradient of the loss.

    The loss is the mean cross-entropy over all targets of all batches, in nats; the model is in evaluation mode, so
    without dropout and with running statistics. batches: tokens, targets and optionally document ids, each `(B, T)`, on
    the model's device. The model keeps no gradients.
    """
    model.eval()
    model.zero_grad()
    n_targets = sum(int((targets != IGNORED).sum()) for _, targets, *_ in batches)
    total = 0.0
    for batch in batches:
        loss_sum, _ = model.loss(*batch)
        (loss_sum / n_targets).backward()
        total += float(loss_sum.detach())
    found = {name: float(g.double().abs().sum()) for name, g in export_gradients(model).items()}
    model.zero_grad()
    return found, total / n_targets


def figure_3(run: OfRun) -> list[Curve]:
    """NormFormer, figure 3: ||g||_1 = sum |g_ij| of the gradient g of W_down, the second fully connected weight, at
    each layer; of the mean loss of the run's own rows."""
    return layer_curves(measured(run), SECOND, float)


def figure_7(run: OfRun) -> list[Curve]:
    """NormFormer, figure 7: (||g||_1 / L) / (||g_first||_1 / L_first) of each weight and layer, L the loss.

    Here ||g||_1 / L of one run; `ratios_to_first` divides. The paper normalises norms "to control for different losses"
    and does not say how; here they are divided by them.
    """
    gradients, loss = measured(run), run.loss
    assert loss is not None
    return [curve for name in PARAMETERS for curve in layer_curves(gradients, name, lambda g_l1: g_l1 / loss)]


def ratios_to_first(curves: Mapping[str, list[Curve]]) -> dict[str, list[Curve]]:
    """NormFormer, figure 7: (||g||_1 / L) / (||g_baseline||_1 / L_baseline) at each x that both have. The baseline is
    the first run."""
    baseline = {(curve.panel, curve.name): curve for curve in next(iter(curves.values()))}
    found: dict[str, list[Curve]] = {}
    for run, of_run in curves.items():
        found[run] = []
        for curve in of_run:
            if (first := baseline.get((curve.panel, curve.name))) is None:
                continue
            x, here, there = np.intersect1d(curve.x, first.x, return_indices=True)
            if len(x):
                with np.errstate(divide="ignore", invalid="ignore"):
                    found[run].append(Curve(curve.panel, curve.name, x, curve.y[here] / first.y[there]))
    return found


def measured(run: OfRun) -> Mapping[str, float]:
    if run.gradient_l1 is None:
        raise NoMeaning(run.no_rows)
    return run.gradient_l1


def on_device(batch: Sequence[Tensor], rows_at_once: int, device: torch.device) -> list[list[Tensor]]:
    """Tokens, targets and optionally document ids `(N, T)`, in pieces of at most `rows_at_once` rows."""
    return [
        [part[first : first + rows_at_once].to(device) for part in batch]
        for first in range(0, len(batch[0]), rows_at_once)
    ]
