"""Keys of what a run keeps and tells: checkpoints, guards, logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from ngpt_train.config.keys import (
    AUTO,
    COUNT,
    COUNT_OR_0,
    SECONDS,
    BoolOrAuto,
    key,
)


@dataclass
class CheckpointConfig:
    """What is saved, and for how long it is kept. The last step is always saved."""

    every: int = key(1000, "Steps between checkpoints; 0 saves at the end only.", **COUNT_OR_0)
    keep_last: int = key(2, "Newest checkpoints that are kept.", **COUNT)
    keep_every: Union[int, None] = key(None, "Checkpoints at multiples of this step are kept for good.", **COUNT)
    keep_best: int = key(0, "Checkpoints of the lowest validation loss that are kept; RUN/best is one.", **COUNT_OR_0)
    asynchronous: BoolOrAuto = key(
        AUTO,
        "Copy the state in memory and write the checkpoint beside training. auto: where half of the host's free memory "
        "holds the copies of its ranks.",
        named="async",
        choices=(AUTO,),
    )
    checksum: str = key(
        "xxh3",
        "By which damaged files are noticed: xxh3 sums as fast as memory is read, sha256 at 1 to 2 GB/s.",
        choices=("xxh3", "sha256"),
    )


@dataclass
class GuardsConfig:
    """What happens when training goes wrong."""

    rollback: bool = key(
        False,
        "Where the loss spikes, or ten gradients in a row are not finite, go back to the last good checkpoint and "
        "leave out the rows since then. It changes the data, so run.json, metrics.jsonl and wandb say it.",
    )
    spike_height: float = key(
        10.0,
        "A loss spikes that exceeds the median of the recent ones by so many of their deviations (at least 1 % each).",
        above=0,
        maximum=1e6,
    )
    spike_window: int = key(64, "Steps whose losses are recent; a quarter must be known.", minimum=4, maximum=10_000)
    most_rollbacks: int = key(3, "Rollbacks to one checkpoint; a further one ends the run with code 4.", **COUNT)


@dataclass
class WandbConfig:
    """Weights & Biases. A failure here never stops a run."""

    mode: str = key(
        AUTO,
        "auto: as WANDB_MODE in the environment says; else online where a project or entity is named, and off where "
        "none is. Online without a key is offline.",
        choices=(AUTO, "online", "offline", "disabled"),
    )
    project: Union[str, None] = key(None, "wandb project; null is ngpt-train.")
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
    sample_prompt: Union[str, None] = key(
        None,
        "A prompt that the model continues at each validation, by generate.max_new_tokens, temperature and their like; "
        "the text goes into the log and metrics.jsonl. null: none.",
    )
    tensorboard: bool = key(False, "Write TensorBoard event files into the run directory as well.")
    wandb: WandbConfig = field(default_factory=WandbConfig)
