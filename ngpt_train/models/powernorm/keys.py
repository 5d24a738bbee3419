"""The keys of model=powernorm."""

from __future__ import annotations

from dataclasses import dataclass

from ngpt_train.config.keys import AUTO, IntOrAuto, key
from ngpt_train.config.model_keys import ModelConfig


@dataclass
class PowerNormConfig(ModelConfig):
    """The baseline's pre-norm decoder with a norm over the batch (PowerNorm paper) in place of RMSNorm."""

    name: str = key("powernorm", "Architecture, chosen with model=NAME.")
    norm: str = key(
        "pn",
        "pn: PowerNorm (Algorithm 2); pn_v: without running statistics (eq. 4-6); batch: BatchNorm; layer: LayerNorm.",
        choices=("pn", "pn_v", "batch", "layer"),
    )
    alpha_fwd: float = key(0.9, "Decay of the running statistics of the forward pass.", above=0, below=1)
    alpha_bkw: float = key(0.9, "Decay of nu, the running statistic of PowerNorm's backward pass.", above=0, below=1)
    psi_warmup_steps: IntOrAuto = key(
        AUTO,
        "Optimizer steps in which pn uses the batch's statistics, not causal; auto is schedule.warmup_steps.",
        choices=(AUTO,),
        minimum=0,
    )
    group_scaling: IntOrAuto = key(
        AUTO,
        "Groups of channels brought to a quadratic mean of 1 before a norm over the batch; auto is n_heads, 0 none.",
        choices=(AUTO,),
        minimum=0,
    )
    statistics: str = key(
        "per_rank",
        "Whether each rank takes statistics of its own rows or all of them together.",
        choices=("per_rank", "synchronised"),
    )
    norm_eps: float = key(1e-5, "Added to the mean square, or the variance, in the norms.", above=0)
