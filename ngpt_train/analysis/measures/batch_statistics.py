"""Statistics of batches beside the running ones, in norms over the batch: PowerNorm's figures 2, 3 and 4.

Symbols are the paper's: X, Y `(B, d)`, a row for each valid token of a batch; mu, sigma, psi, gamma `(d,)`, and mu_B,
sigma_B, psi_B for the batch. sigma = sqrt(variance + eps) and psi = sqrt(mean square + eps), as the model divides.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ngpt_train.analysis.measures.of_run import Curve, NoMeaning, OfRun, as_values, by_layer, named_curve, some, zipped
from ngpt_train.core.constants import IGNORED
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.weights import canonical
from ngpt_train.observe.telemetry.batch_distances import MEAN_SQUARES, SYMBOLS, in_symbols

KINDS = ("norm_attn", "norm_post_attn", "norm_mlp", "norm_post_mlp", "norm_cross")


def distance(batch: Tensor, running: Tensor) -> float:
    """dist(mu_B, mu) = ||mu_B - mu|| / d (section 3.1), fp64."""
    return float(torch.linalg.vector_norm((batch - running).double())) / len(batch)


def gradient_term(dL_dY: Tensor, X_hat: Tensor | None, gamma: Tensor, root: Tensor) -> float:
    """Without X_hat: ||gamma / (sigma_B B) * sum_j dL/dy_j|| / d, the term of mu_B in eq. 3. With X_hat:
    ||gamma / (sigma_B B) * sum_j dL/dy_j * x_hat_j|| / d, the term of sigma_B^2, and in PN-V of psi_B^2 (eq. 6).

    The second term is multiplied by x_hat_i for token i. The mean square of x_hat over the tokens is 1 in each channel.
    fp64.
    """
    products = dL_dY if X_hat is None else dL_dY * X_hat  # (B, d)
    term = gamma.double() / root.double() * products.double().mean(dim=0)
    return float(torch.linalg.vector_norm(term)) / len(term)


def batch_gaps(model: Decoder, batches: Sequence[Sequence[Tensor]], step: int) -> list[dict[str, dict[str, float]]]:
    """For each batch, the distances and gradient terms by name at each norm over the batch, by its canonical name, in
    the order of the forward pass.

    Each batch goes through the model as in a training step after `step` steps, but without dropout; weights and running
    statistics stay. Distances are between mu_B and mu, sigma_B and sigma, sigma_B^2 and sigma^2, psi_B and psi, psi_B^2
    and psi^2. Gradient terms of the batch's mean loss are g_mu, g_sigma_squared and, for PN-V, g_psi_squared. PowerNorm
    itself has no such term: its backward pass takes nu in its place.
    """
    norms = {canonical(place): module for place, module in model.named_modules() if hasattr(module, "on_batch")}
    found = []
    model.eval()
    for norm in norms.values():
        norm.train()  # the norms alone: dropout stays off
    for batch in batches:
        n_targets = max(1, int((batch[1] != IGNORED).sum()))
        with _unchanged(model), _watched(norms) as seen:
            model.begin_step_(step, torch.tensor(1 / n_targets, device=batch[0].device))
            (model.loss(*batch)[0] / n_targets).backward()
        found.append(seen)
        model.zero_grad()
    model.eval()
    return found


@contextlib.contextmanager
def _unchanged(model: Decoder) -> Iterator[None]:
    before = {name: value.clone() for name, value in model.statistics().items()}
    try:
        yield
    finally:
        for name, value in model.statistics().items():
            value.copy_(before[name])


@contextlib.contextmanager
def _watched(norms: Mapping[str, Any]) -> Iterator[dict[str, dict[str, float]]]:
    """The values of a batch by norm, in the order of the calls; gradient terms come with the backward pass."""
    seen: dict[str, dict[str, float]] = {}

    def forward(name: str, norm: Any, arguments: Any, output: Any) -> None:
        (x, valid, *_), (Y, batch) = arguments, output
        if batch is None:
            return
        kept = slice(None) if valid is None else valid.to(torch.bool)
        X = norm.group_scaled(x.detach().to(norm.gain.dtype))[kept].reshape(-1, x.shape[-1])
        seen[name] = compared(norm, batch.values)
        if "psi_squared" in norm.statistics() and "nu" in norm.statistics():
            return  # PowerNorm
        mu_B = batch.values[0] if len(batch.values) > 1 else None
        root = norm.root(batch.values[-1])

        def backward(dL_dY: Tensor) -> None:
            g = dL_dY[kept].reshape(-1, x.shape[-1])
            if mu_B is not None:
                seen[name]["g_mu"] = gradient_term(g, None, norm.gain, root)
            symbol = "psi" if mu_B is None else "sigma"
            X_hat = (X if mu_B is None else X - mu_B) / root
            seen[name][f"g_{symbol}_squared"] = gradient_term(g, X_hat, norm.gain, root)

        Y.register_hook(backward)

    handles = [norm.register_forward_hook(partial(forward, name)) for name, norm in norms.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def compared(norm: Any, values: Sequence[Tensor]) -> dict[str, float]:
    """The distances of a batch's statistics from the running ones."""
    found = {}
    # The model moves the running statistics after the block, so this batch is not in them yet.
    for (name, running), value in zip(norm.statistics().items(), values, strict=False):
        symbol = SYMBOLS.get(name, name)
        found[symbol] = distance(in_symbols(norm, name, value), in_symbols(norm, name, running))
        if name in MEAN_SQUARES:
            found[f"{symbol}_squared"] = distance(value, running)
    return found


def over_batches(run: OfRun, names: Sequence[str]) -> list[Curve]:
    """For the first norm over the batch: a value for each batch. For each layer: the mean over the batches, and the
    variance, divided by n - 1."""
    if not run.over_batch:
        raise NoMeaning("has no norm over the batch")
    if run.batches is None:
        raise NoMeaning(run.no_rows)
    gaps = run.batches
    first, *_ = gaps[0]
    curves = []
    for name in names:
        if name not in gaps[0][first]:
            continue
        curves.append(Curve(name, "", *zipped([(n, gap[first][name]) for n, gap in enumerate(gaps)]), kind="points"))
        by_norm = {norm: [gap[norm][name] for gap in gaps] for norm in gaps[0]}
        for kind in KINDS:
            for stack, layers in by_layer(by_norm, kind).items():
                x, all_values = as_values(list(layers)), np.array(list(layers.values()))  # (layers, batches)
                curves.append(Curve(f"{name}_mean", named_curve(stack, kind), x, all_values.mean(axis=1)))
                if all_values.shape[1] > 1:
                    variance = all_values.var(axis=1, ddof=1)
                    curves.append(Curve(f"{name}_variance", named_curve(stack, kind), x, variance))
    return some(curves, f"has a norm over the batch, but {' and '.join(names)} are not among its statistics")
