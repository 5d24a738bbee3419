"""Embeddings: nGPT's figure 4 and PowerNorm's figure 6."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ngpt_train.analysis.measures.of_run import Curve, OfRun, Values, as_values, over_ranks

BINS = 2000  # of the histogram of dot products, between the extremes for these norms
ROWS_AT_ONCE = 256  # products of so many rows with all others are in memory


def of_model(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The embeddings `(V, d)` by panel; tied embeddings have the same `input` and `output`."""
    found = {"input": weights["embedding"], "output": weights.get("output", weights["embedding"])}
    return {**found, **({"source": weights["source_embedding"]} if "source_embedding" in weights else {})}


def row_norms(E: Tensor) -> Tensor:
    """||E_i|| of each row of E `(V, d)`: `(V,)` fp64."""
    return torch.linalg.vector_norm(E.double(), dim=1)


def eigenvalues_over_median(E: Tensor) -> Tensor:
    """lambda / median(lambda), with the eigenvalues lambda `(d,)` of the covariance matrix of the rows of E `(V, d)`,
    C = X^T X / (V - 1), X = E - mean(E). fp64, the largest first.

    lambda = sigma^2 / (V - 1), with the singular values sigma of X, keeps the digits of small eigenvalues. With fewer
    rows than dimensions the other eigenvalues are 0. The median of an even number is the mean of the middle two.
    """
    X = E.double() - E.double().mean(dim=0)
    sigma = torch.linalg.svdvals(X)
    eigenvalues = torch.zeros(E.shape[1], dtype=torch.float64)
    eigenvalues[: len(sigma)] = sigma.square().cpu() / (len(E) - 1)
    return eigenvalues / eigenvalues.quantile(0.5)


def pairwise_dot_products(E: Tensor) -> tuple[Values, Values]:
    """The density of E_i . E_j over all pairs i < j of rows of E `(V, d)`, fp64: the ends of bins `(n + 1,)`, and the
    share of pairs in each bin divided by its width `(n,)`.

    BINS equal bins divide [-r^2, r^2], r the largest norm; empty bins at the ends are left out.
    """
    E = E.double()
    r_squared = float(row_norms(E).max()) ** 2
    counts = torch.zeros(BINS, dtype=torch.float64, device=E.device)
    for first in range(0, len(E), ROWS_AT_ONCE):
        products = E[first : first + ROWS_AT_ONCE] @ E[first:].T  # (rows, V - first)
        pairs = torch.ones_like(products, dtype=torch.bool).triu(diagonal=1)  # i < j
        # A product of two rows of the largest norm may be above it by a rounding.
        counts += torch.histc(products[pairs].clamp(-r_squared, r_squared), BINS, -r_squared, r_squared)
    found = as_values(counts)
    edges = np.linspace(-r_squared, r_squared, BINS + 1)
    low, high = np.flatnonzero(found)[[0, -1]]
    density = found / found.sum() / np.diff(edges)
    return edges[low : high + 2], density[low : high + 1]


def figure_4(run: OfRun) -> list[Curve]:
    """nGPT, figure 4: the norms ||E_i||; the eigenvalues of the covariance matrix of the rows E_i, divided by their
    median; the density of E_i . E_j over all pairs i < j. Norms and eigenvalues are sorted, the largest first. fp64."""
    curves = []
    for which, E in of_model(run.weights).items():
        curves.append(Curve(f"{which}_norms", "", *over_ranks(row_norms(E))))
        curves.append(Curve(f"{which}_eigenvalues", "", *over_ranks(eigenvalues_over_median(E))))
        edges, density = pairwise_dot_products(E)
        curves.append(Curve(f"{which}_dot_products", "", (edges[1:] + edges[:-1]) / 2, density, edges=edges))
    return curves


def singular_values_over_largest(E: Tensor) -> Tensor:
    """sigma_i / sigma_1 of E `(V, d)`, fp64, the largest first."""
    sigma = torch.linalg.svdvals(E.double())
    return sigma / sigma[0]


def powernorm_figure_6(run: OfRun) -> list[Curve]:
    """PowerNorm, figure 6: sigma_i / sigma_1, the singular values of the embedding matrix divided by the largest. It is
    not centred. fp64."""
    return [
        Curve(which, "", *over_ranks(singular_values_over_largest(E))) for which, E in of_model(run.weights).items()
    ]
