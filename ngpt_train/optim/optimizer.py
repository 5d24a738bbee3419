"""Adam and AdamW over the groups that the model names."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ngpt_train.config.schema import OptimConfig
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.adam import unsupported
from ngpt_train.models import Decoder, ParameterGroup
from ngpt_train.models.layers.linear import cast_linears
from ngpt_train.optim.row_adam import RowAdam


def build_optimizer(model: Decoder, groups: list[ParameterGroup], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over `model`'s parameters, in torch's fused form (one pass over memory, on CPUs too).

    `groups` names the parameters as `model.named_parameters()` does. The learning rate is set before
    each step from the schedule. Moments have the dtype of the weights, fp32. Where Triton runs it is
    RowAdam, which does the model's projection as well and, where products are in bf16, the cast; FSDP2 casts its shards
    itself.
    """
    parameters = dict(model.named_parameters())
    assert sorted(parameters) == sorted(name for group in groups for name in group.names)
    arguments: list[dict[str, Any]] = [
        {
            "params": [parameters[name] for name in group.names],
            "weight_decay": config.weight_decay if group.decay else 0.0,
        }
        for group in groups
    ]
    beta1, beta2 = config.betas
    matrices = [parameter for parameter in parameters.values() if parameter.ndim == 2]
    reason = next((found for matrix in matrices if (found := unsupported(matrix))), None)
    if dispatch.runs_on_triton("adam", *matrices, unsupported=reason):
        casts = model.compute_dtype == torch.bfloat16
        return RowAdam(
            arguments,
            unit_rows=[group.unit_rows for group in groups],
            copied=[linear for linear in cast_linears(model) if casts and not isinstance(linear.matrix, DTensor)],
            lr=0.0,
            betas=(beta1, beta2),
            eps=config.eps,
            decoupled_weight_decay=config.name == "adamw",
        )
    optimizer = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    # The rate is 0 until the schedule sets it: a step that forgot to would be seen at once.
    return optimizer(arguments, lr=0.0, betas=(beta1, beta2), eps=config.eps, fused=True)
