"""A sublayer in the residual stream, and where its norms stand."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Map = Callable[[Tensor], Tensor]
T = TypeVar("T")


def identity(x: T) -> T:
    return x


def residual(
    x: Tensor,
    f: Map,
    drop: Map,
    *,
    norm_in: Map = identity,
    norm_out: Map = identity,
    norm_sum: Map = identity,
    lambda_: Map = identity,
    gamma: Map = identity,
) -> Tensor:
    """norm_sum(lambda x + drop(gamma norm_out(f(norm_in(x))))): x and the result `(B, T, d_model)`.

    f: the sublayer, attention or MLP. drop: dropout of the whole addend. lambda_: ResScale's. gamma: LayerScale's. An
    architecture has one or two of the norms; the others are the identity:

        pre         x + f(norm_in(x))               Pre-LN (Xiong et al. 2020): GPT, eq. 4 and 5 of nGPT's paper
        post        norm_sum(x + f(x))              Post-LN (Vaswani et al. 2017)
        peri        x + norm_out(f(norm_in(x)))     Sandwich-LN (CogView, Ding et al. 2021), Peri-LN (Kim et al. 2025)
        reordered   x + norm_out(f(x))              OLMo 2 (2024)
    """
    return norm_sum(lambda_(x) + drop(gamma(norm_out(f(norm_in(x))))))
