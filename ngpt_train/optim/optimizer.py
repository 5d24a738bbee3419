"""Builds the optimizer over the model's parameter groups, with the learning rate of each group; optim.storage=bf16."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.optim import OptimConfig
from ngpt_train.config.validate import report_together
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.adam import unsupported
from ngpt_train.models.decoder import Decoder, ParameterGroup
from ngpt_train.models.layers.linear import cast_linears
from ngpt_train.models.rank_rows import is_sharded, local_rows
from ngpt_train.optim.fused_adam import FusedAdam
from ngpt_train.optim.gated_adam import GatedAdam
from ngpt_train.optim.row_adam import RowAdam

# Of optim.storage=bf16: the matrices that stay fp32, and the moments that do not.
TABLES = ("embedding", "source_embedding", "output", "positions")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def build_optimizer(
    model: Decoder, groups: list[ParameterGroup], config: OptimConfig, mesh: DeviceMesh | None = None
) -> FusedAdam:
    """The optimizer over all of `model`'s parameters, `optim.name`.

    groups: name the parameters as `model.named_parameters()` does, each in one group. Moments are fp32, as weights.

    Where the Triton kernel of Adam runs (`kernels.dispatch`) the optimizer is RowAdam. It also projects the rows and,
    where matrix products are in bf16, writes the matrices' bf16 copies, except under FSDP2, which casts its shards
    itself. Elsewhere it is FusedAdam. With `optim.gate_power` it is GatedAdam, on any device.

    For muon, normuon, adamh and muonh it is MatrixOptimizer, which neither projects nor writes copies. Newton-Schulz is
    in the dtype of matrix products, bf16 for fp16. mesh: ranks that have all weights whole and share out that work.
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
    if config.matrix_step is not None:
        from ngpt_train.optim.matrix_optimizer import MatrixOptimizer, block_matrices  # which imports DTensor

        dtype = model.embedding.dtype if model.compute_dtype is None else torch.bfloat16
        return MatrixOptimizer(arguments, block_matrices(model), config, dtype, mesh)
    beta1, beta2 = config.betas
    # lr is 0 until the training step sets it from the schedule, so that forgetting it shows at once.
    options: dict[str, Any] = {"lr": 0.0, "betas": (beta1, beta2), "eps": config.eps}
    decoupled = {"decoupled_weight_decay": config.name == "adamw"}
    matrices = [parameter for parameter in parameters.values() if parameter.ndim == 2]
    reason = next((found for matrix in matrices if (found := unsupported(matrix))), None)
    if config.gate_power is not None:
        reason = f"optim.gate_power={config.gate_power}"
    if dispatch.runs_on_triton("adam", *matrices, unsupported=reason):
        casts = model.compute_dtype == torch.bfloat16
        copied = [x for x in cast_linears(model) if casts and not is_sharded(x.matrix)]
        return RowAdam(arguments, [group.constraint for group in groups], copied, **options, **decoupled)
    if config.gate_power is not None:
        return GatedAdam(arguments, config.gate_power, config.gate_eps, **options, **decoupled)
    return FusedAdam(arguments, **options, **decoupled)


def lr_factors(groups: Sequence[ParameterGroup], config: Config) -> list[float]:
    """For each group, its learning rate / the rate of the step. It is 1 unless the config has a rate for the kind of
    parameter (optim.groups), the architecture has (`ModelConfig.lr_factors`) or the run has a rule (optim.lr_rule).
    Raises ConfigError for a rate of parameters that the model does not have."""
    there = {group.kind or "vector" for group in groups if group.names}
    for kind in config.optim.groups.chosen():
        if kind not in there:
            key = f"optim.groups.{kind}"
            raise report_together(config, (f"{key} model.name", "no such parameters", f"Leave {key} out"), origins={})
    factors, of_rule = config.model.lr_factors(config.train.steps), factor_of_rule(config)
    found = []
    for group in groups:
        kind = group.kind or "vector"
        rate: float | None = getattr(config.optim.groups, kind, None)
        of_model = 1.0 if factors is None else getattr(factors, kind)
        found.append(of_rule * (of_model if rate is None else rate / float(config.optim.lr)))
    return found


def factor_of_rule(config: Config) -> float:
    """The rate of all parameters / optim.lr, by optim.lr_rule; `config` is resolved. A size that optim.reference lacks
    is the run's."""
    if config.optim.lr_rule == "none":
        return 1.0
    reference, depth = config.optim.reference, config.model.n_layers
    batch = config.train.rows_per_step * config.model.context
    tokens = batch * config.train.steps
    of_batch, of_depth = batch / (reference.batch_tokens or batch), depth / (reference.n_layers or depth)
    return hyperp(of_batch, of_depth, tokens / (reference.tokens or tokens))


def hyperp(batch: float, depth: float, horizon: float) -> float:
    """HyperP's factor of the rate (arXiv 2603.28743), which its authors use with MuonH: sqrt(B) L^(-1/2) T^(-0.32).

    batch, depth and horizon: B tokens a step, L layers and T tokens in all, each relative to the reference's. Width has
    no part in it. The authors measured the exponent 0.558 for B.
    """
    return batch**0.5 * depth**-0.5 * horizon**-0.32


@torch.no_grad()
def round_to_bf16_(model: Decoder, optimizer: torch.optim.Optimizer | None = None) -> None:
    """optim.storage=bf16: no fp32 master. To be called after each step, and before the first.

    w <- bf16(w) for each matrix of the blocks, and for its moments.

    The step itself is in fp32, as in torch's fused Adam on bf16 tensors. bf16 has 8 bits of precision, so rounding
    loses a step of less than 1/512 of a weight. Tables and vectors stay fp32. Rounding twice changes no bit.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name.partition(".")[0] not in TABLES:
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for tensor in (parameter, *(state[moment] for moment in MOMENTS if moment in state)):
                rows = local_rows(tensor)
                rows.copy_(rows.to(torch.bfloat16))
