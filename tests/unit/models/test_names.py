"""Names of weights: a FusedLinear's parts; no two weights share a name."""

import pytest
import torch
from torch import nn

from ngpt_train.models import export_weights
from ngpt_train.models.layers.linear import FusedLinear, OutputLinear
from ngpt_train.models.layers.norms import RMSNorm


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.w_uv = FusedLinear({"w_u": 3, "w_v": 2}, 4, bias=True)
        self.mlp.w_down = OutputLinear({"w_down": 3}, 4, bias=True)
        self.norm = RMSNorm(4, 1e-6)


def test_parts_of_a_fused_matrix() -> None:
    """Caught: parts exchanged or cut in the wrong place, a bias with its matrix's name or of the wrong length, a
    weight's name with the product's in it."""
    block = Block()
    for number, parameter in enumerate(block.parameters()):
        nn.init.constant_(parameter, number)
    with torch.no_grad():
        block.mlp.w_uv.matrix[3:] = 9
        block.mlp.w_uv.bias[3:] = 8
    expected = {
        "w_u": ((3, 4), 0),
        "w_v": ((2, 4), 9),
        "b_u": ((3,), 1),
        "b_v": ((2,), 8),
        "w_down": ((3, 4), 2),
        "b_down": ((4,), 3),
        "norm": ((4,), 4),
    }
    found = export_weights(block)
    assert {name: (tuple(x.shape), x.flatten()[0].item()) for name, x in found.items()} == expected


@pytest.mark.parametrize("second", ["w_u", "norm"])
def test_two_weights_never_share_a_name(second: str) -> None:
    """Caught: one of both exported, and the other never loaded, in silence."""
    block = Block()
    block.attention = nn.Module()
    if second == "norm":
        block.attention.norm = RMSNorm(4, 1e-6)
    else:
        block.attention.product = FusedLinear({second: 3}, 4)
    with pytest.raises(ValueError, match=rf"two weights are called {second}: .*{second}"):
        export_weights(block)
