"""Where a norm stands: the equations of a sublayer f, attention or MLP, in the residual stream.

x, f(x) and the result are `(B, T, d_model)`. Around a sublayer may also stand ResScale's lambda on the residual and
LayerScale's gamma on what the sublayer adds, which dropout drops last of all; without them all are the identity.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

Map = Callable[[Tensor], Tensor]


class Around(NamedTuple):
    """What stands around a sublayer, as functions of `(B, T, d_model)`. A placement has one of the norms or both."""

    norm_in: Map
    norm_out: Map
    lambda_: Map
    gamma: Map
    drop: Map


def pre(x: Tensor, f: Map, a: Around) -> Tensor:
    """Pre-LN (Xiong et al. 2020)."""
    return a.lambda_(x) + a.drop(a.gamma(f(a.norm_in(x))))


def post(x: Tensor, f: Map, a: Around) -> Tensor:
    """Post-LN (Vaswani et al. 2017). The last norm of the last block is the model's final norm."""
    return a.norm_out(a.lambda_(x) + a.drop(a.gamma(f(x))))


def peri(x: Tensor, f: Map, a: Around) -> Tensor:
    """Sandwich-LN (CogView, Ding et al. 2021), Peri-LN (Kim et al. 2025); NormFormer's attention."""
    return a.lambda_(x) + a.drop(a.gamma(a.norm_out(f(a.norm_in(x)))))


def reordered(x: Tensor, f: Map, a: Around) -> Tensor:
    """OLMo 2 (2024)."""
    return a.lambda_(x) + a.drop(a.gamma(a.norm_out(f(x))))


class Placement(NamedTuple):
    """An equation, and which norms it has."""

    apply: Callable[[Tensor, Map, Around], Tensor]
    has_norm_in: bool
    has_norm_out: bool

    def norms(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
        """norm_in and norm_out, made by `make`; the identity in the place of one that the equation does not have."""
        return (make() if self.has_norm_in else nn.Identity()), (make() if self.has_norm_out else nn.Identity())


PLACEMENTS = {
    "pre": Placement(pre, has_norm_in=True, has_norm_out=False),
    "post": Placement(post, has_norm_in=False, has_norm_out=True),
    "peri": Placement(peri, has_norm_in=True, has_norm_out=True),
    "reordered": Placement(reordered, has_norm_in=False, has_norm_out=True),
}
