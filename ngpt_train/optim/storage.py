"""Weights and moments that are kept in bf16 between steps, without an fp32 master."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ngpt_train.optim.row_adam import local_rows

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder

TABLES = ("embedding", "source_embedding", "output", "positions")
MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def round_to_bf16_(model: Decoder, optimizer: torch.optim.Optimizer | None = None) -> None:
    """w <- bf16(w) for each matrix of the blocks, and for its moments; after each step, and before the first.

    The step itself is in fp32, as in torch's fused Adam on bf16 tensors. bf16 has 8 bits of precision, so rounding
    loses a step of less than 1/512 of a weight. Tables and vectors stay fp32. Rounding twice changes no bit.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name.partition(".")[0] not in TABLES:
            _round_(parameter)
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in state:
                    _round_(state[moment])


def _round_(tensor: Tensor) -> None:
    rows = local_rows(tensor)
    rows.copy_(rows.to(torch.bfloat16))
