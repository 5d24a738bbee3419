"""Keys of what a run measures and writes while it trains: validation, records, wandb. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from ngpt_train.config.keys import AUTO, COUNT, COUNT_OR_0, ROWS, SECONDS, key


@dataclass
class EvalConfig:
    """Validation during training."""

    every: int = key(500, "Steps between validations; 0 validates at the start and at the end only.", **COUNT_OR_0)
    rows: Union[int, None] = key(
        64, "Rows of the fixed validation set (fewer where the data has fewer); set this or tokens.", **ROWS
    )
    tokens: Union[int, None] = key(
        None,
        "Targets of the fixed validation set, at least (fewer where the data has fewer, which the log says); replaces "
        "rows.",
        minimum=1,
        maximum=10_000_000_000,
    )
    budget: Union[float, None] = key(
        None,
        "Share of the compute between two validations that a validation before the last may take: it then has fewer "
        "of the rows, always the same. null: no limit.",
        above=0,
        maximum=1000,
    )
    contexts: Union[list[int], None] = key(
        None,
        "Row lengths that the model is validated at besides model.context, such as [2048,4096], on the same text as "
        "far as whole rows allow: metrics loss_ctx2048 and so on. null: none.",
        **COUNT,
    )


@dataclass
class WandbConfig:
    """Weights & Biases. A failure here never stops a run."""

    mode: str = key(AUTO, "auto: online with a key, else offline.", choices=(AUTO, "online", "offline", "disabled"))
    project: str = key("ngpt-train", "wandb project.")
    entity: Union[str, None] = key(None, "wandb team or user; null is the account's default.")
    name: Union[str, None] = key(None, "Name of the run in wandb; null is run.name.")
    group: Union[str, None] = key(None, "Runs that wandb shows together; null is the experiment, or else the scale.")
    tags: Union[list[str], None] = key(
        None, "Words to find the run by; null is architecture, scale and, of an experiment, its name or table."
    )
    notes: Union[str, None] = key(None, "A text about the run, for wandb's page of it.")
    timeout: float = key(
        20.0,
        "Seconds that wandb has to start, else it goes offline, and to finish; the run trains meanwhile.",
        **SECONDS,
    )


@dataclass
class LoggingConfig:
    """What is written while training."""

    every: int = key(10, "Steps between lines of metrics.jsonl and of the console.", **COUNT)
    telemetry: int = key(
        0,
        "Steps between telemetry records (docs/telemetry.md): norms, updates, scales and attention of each layer; 0: "
        "none. 100 costs less than 1 % of the time.",
        **COUNT_OR_0,
    )
    tensorboard: bool = key(False, "Write TensorBoard event files into the run directory as well.")
    wandb: WandbConfig = field(default_factory=WandbConfig)
