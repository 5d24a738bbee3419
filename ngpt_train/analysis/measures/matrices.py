"""Embeddings and matrices, their norms, eigenvalues and singular values: nGPT's figures 4, 5 and 10 to 12, PowerNorm's
figure 6."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ngpt_train.analysis.measures.of_run import (
    Curve,
    OfRun,
    Values,
    as_values,
    by_layer,
    named_curve,
    over_ranks,
    some,
    zipped,
)

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


def powernorm_figure_6(run: OfRun) -> list[Curve]:
    """PowerNorm, figure 6: sigma_i / sigma_1, the singular values of the embedding matrix divided by the largest. It is
    not centred. fp64."""
    spectra = {which: singular_values(E) for which, E in of_model(run.weights).items()}
    return [Curve(which, "", *over_ranks(sigma / sigma[0])) for which, sigma in spectra.items()]


# The paper's panels: Q, K and V by head, and the matrices of the MLP whole.
ATTENTION = ("wq", "wk", "wv")
MLP = ("w_u", "w_v", "w_down")  # MLP11, MLP12, MLP2


def heads(matrix: Tensor, n_heads: int) -> Tensor:
    """W `(n_heads * d_head, d)` as the matrices of its heads `(n_heads, d_head, d)`."""
    return matrix.view(n_heads, -1, matrix.shape[1])


def singular_values(matrices: Tensor) -> Tensor:
    """`(..., m, n)` -> `(..., min(m, n))` fp64, the largest first. fp32 would lose values below 1e-7 of the largest."""
    return torch.linalg.svdvals(matrices.double())


def condition_numbers(matrices: Tensor) -> Tensor:
    """sigma_max / sigma_min of each matrix, `(..., m, n)` -> `(...)` fp64; infinite where sigma_min is 0."""
    sigma = singular_values(matrices)
    return sigma[..., 0] / sigma[..., -1]


def renormalized(matrix: Tensor) -> Tensor:
    """W_i / ||W_i|| of each row of W `(rows, d)`, fp64: nGPT's normalisation along the embedding dimension (section
    2.6, item 2), done once after training. A row of zeros stays."""
    return matrix.double() / row_norms(matrix).clamp(min=1e-12)[:, None]


def n_heads_of(run: OfRun, name: str) -> int:
    """1 for a matrix of the MLP, which is taken whole."""
    if name not in ATTENTION:
        return 1
    return run.model.n_heads if name == "wq" else run.model.n_kv_heads or run.model.n_heads


@lru_cache(maxsize=2)  # figures 5 and 10 share the numbers of a run, which take minutes for a large model
def medians(run: OfRun, renormalize: bool = False) -> list[Curve]:
    """For each matrix and layer: condition numbers of the heads, and their median (of an even number, the mean of the
    middle two). x is the layer i of `layers.{i}`."""
    curves = []
    for name in (*ATTENTION, *MLP):
        for stack, layers in by_layer(run.weights, name).items():
            points, middle = [], []
            for layer, matrix in layers.items():
                W = renormalized(matrix) if renormalize else matrix
                found = condition_numbers(heads(W, n_heads_of(run, name)))  # (n_heads,)
                points += [(layer, value) for value in found.tolist()]
                middle.append((layer, float(found.quantile(0.5))))
            suffix = " (renormalized)" if renormalize else ""
            kind = "dotted" if renormalize else "line"
            curves.append(Curve(name, named_curve(stack, f"median{suffix}"), *zipped(middle), kind=kind))
            if name in ATTENTION:
                curves.append(Curve(name, named_curve(stack, f"heads{suffix}"), *zipped(points), kind="points"))
    return curves


def figure_10(run: OfRun) -> list[Curve]:
    """nGPT, figure 10: sigma_max / sigma_min as in figure 5, and for a run whose rows are not kept on the sphere also
    after each row is divided by its norm, W_i / ||W_i||. fp64."""
    return [*medians(run), *([] if run.on_sphere else medians(run, renormalize=True))]


def of_one_layer(run: OfRun, layer: int) -> list[Curve]:
    """Row norms of the whole W_q and W_k of `layers.{layer}`, and the singular values of each head."""
    curves = []
    for name in ("wq", "wk"):
        for stack, layers in by_layer(run.weights, name).items():
            if layer not in layers:
                continue
            curves.append(Curve(f"{name}_norms", named_curve(stack, ""), *over_ranks(row_norms(layers[layer]))))
            for number, sigma in enumerate(singular_values(heads(layers[layer], n_heads_of(run, name)))):
                said = named_curve(stack, f"head {number}")
                curves.append(Curve(f"{name}_singular_values", said, *over_ranks(sigma)))
    return some(curves, f"has {run.model.n_layers} layers, and the figure shows layer {layer + 1}")
