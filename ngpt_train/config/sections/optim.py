"""Keys of the optimizer and of the learning rate over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

from ngpt_train.config import lr_table
from ngpt_train.config.keys import (
    AUTO,
    COUNT_OR_0,
    FloatOrAuto,
    IntOrAuto,
    Table,
    key,
)


@dataclass
class OptimConfig:
    """The optimizer. The recipe of the architecture sets these."""

    name: str = key("adamw", "Optimizer; adam never decays.", choices=("adam", "adamw"))
    lr: FloatOrAuto = key(
        AUTO, "Peak learning rate; auto looks up lr_table by scale, context and budget.", above=0, maximum=1000
    )
    # {scale: {context: lr or entries}}, which lr_table.py checks: OmegaConf fails to merge two typed dicts of dicts.
    lr_table: dict[str, Any] = key(
        {},
        "lr by scale, then context, then tokens or steps of the whole run. The longest context within model.context "
        "counts, else the shortest there is; of its entries the one with the nearest budget, by its logarithm.",
        table=Table(lr_table.problem_of, "{tiny: {256: 0.001}}", "Set optim.lr, or write a recipe in YAML"),
    )
    lr_source: str = key("", "Where optim.lr is from, which the log says. With lr=auto the entry of lr_table says it.")
    betas: list[float] = key([0.9, 0.95], "Adam's decay rates of the first and second moment.")
    eps: float = key(1e-8, "Adam's epsilon.", above=0, maximum=1)
    weight_decay: float = key(
        0.1, "Decoupled weight decay of the matrices; nGPT takes only 0.", minimum=0, maximum=1000
    )
    z_loss: float = key(
        0.0,
        "Adds this times logsumexp(logits)^2 to a target's loss in training, for example 1e-4, which keeps logits from "
        "drifting; 0: none. The losses of metrics.jsonl and of validations are without it; train records have its "
        "part as z_loss.",
        minimum=0,
        maximum=1000,
    )
    label_smoothing: float = key(
        0.0,
        "Share of a target's label that training spreads evenly over all tokens of the vocabulary, as torch's "
        "cross_entropy does; 0: none. The losses of metrics.jsonl and of validations are without it.",
        minimum=0,
        below=1,
    )
    clip_norm: Union[float, None] = key(
        1.0, "Largest global gradient norm; larger gradients are scaled down to it. null: no clipping.", above=0
    )
    storage: str = key(
        "fp32",
        "How the blocks' matrices and their moments are kept between steps. bf16: rounded after each, as parameters in "
        "bf16 without an fp32 master are, by which public comparisons trained their baseline; it saves no memory here.",
        choices=("fp32", "bf16"),
    )
    ema_decay: Union[float, None] = key(
        None,
        "Keeps a moving average of the weights: after each step ema <- ema_decay ema + (1 - ema_decay) w, for example "
        "0.999. `evaluate` and `generate` use it with evaluate.weights=ema. null: none.",
        above=0,
        below=1,
    )


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step."""

    kind: str = key(
        "cosine",
        "Shape after the warmup: cosine, linear, wsd (stable, then linear decay), constant, inverse_sqrt (falls as 1 / "
        "sqrt(step), whatever train.steps is; a warmup of 0 counts as 1), or ramp (no warmup: grows from 0 to optim.lr "
        "over train.steps, to see at which rate the loss explodes).",
        choices=("cosine", "wsd", "linear", "constant", "inverse_sqrt", "ramp"),
    )
    warmup_steps: IntOrAuto = key(
        AUTO,
        "Linear warmup; auto is min(2000, 10 % of train.steps), of a ramp 0. One that a file sets is auto where a "
        "train.steps that is set later leaves no room for it.",
        **COUNT_OR_0,
    )
    warmup_tokens: Union[int, None] = key(
        None,
        "Linear warmup in tokens, for example 375000000: rounded up to whole steps, it replaces warmup_steps.",
        minimum=0,
        maximum=1_000_000_000_000_000,
    )
    final_lr: float = key(
        0.0, "Learning rate that cosine, linear and wsd end at; the others take only 0.", minimum=0, maximum=1000
    )
    final_share: Union[float, None] = key(
        None,
        "schedule.final_lr as a share of optim.lr, for example 0.1, so that it follows a rate that is tuned.",
        minimum=0,
        maximum=1,
    )
    decay_fraction: float = key(0.2, "wsd: last part of train.steps that decays.", above=0, maximum=1)
