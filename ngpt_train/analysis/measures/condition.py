"""Condition numbers, row norms and singular values of matrices: nGPT's figures 5, 10, 11 and 12."""

from functools import lru_cache

import torch
from torch import Tensor

from ngpt_train.analysis.measures.embeddings import row_norms
from ngpt_train.analysis.measures.of_run import (
    Curve,
    OfRun,
    by_layer,
    named_curve,
    over_ranks,
    some,
    zipped,
)

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
def medians(run: OfRun, renormalize: bool) -> list[Curve]:
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


def figure_5(run: OfRun) -> list[Curve]:
    """nGPT, figure 5: sigma_max / sigma_min of each head's W_q, W_k and W_v `(d_head, d)`, and its median over the
    heads of a layer; of the MLP's W_u, W_v and W_down whole. fp64."""
    return list(medians(run, renormalize=False))


def figure_10(run: OfRun) -> list[Curve]:
    """nGPT, figure 10: sigma_max / sigma_min as in figure 5, and for a run whose rows are not kept on the sphere also
    after each row is divided by its norm, W_i / ||W_i||. fp64."""
    return [*medians(run, renormalize=False), *([] if run.on_sphere else medians(run, renormalize=True))]


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


def figure_11(run: OfRun) -> list[Curve]:
    """nGPT, figure 11: norms ||W_i|| of the rows of W_q and W_k of the third layer, `layers.2`, and the singular values
    of each of its heads, the largest first. fp64."""
    return of_one_layer(run, 2)


def figure_12(run: OfRun) -> list[Curve]:
    """nGPT, figure 12: as figure 11, of the fourth layer, `layers.3`."""
    return of_one_layer(run, 3)
