"""The keys plan.* and doctor.*: what a run would need, and whether it would work here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import key

# Memory in GiB that a program sees of a card, rounded down.
CARDS = {"a100_40gb": 39, "a100_80gb": 79, "h100_80gb": 79}


@dataclass
class PlanConfig:
    """Size, memory and time of a run without running it (`plan`)."""

    world_size: int = key(1, "Ranks that the run is planned for.", minimum=1, maximum=10_000_000)
    ranks_per_host: int = key(8, "Ranks of each host, the groups of parallel=hsdp.", minimum=1, maximum=10_000)
    device: Union[str, None] = key(
        None,
        "Card for whose memory micro rows, recomputation and layout are chosen and printed, but for your arguments; "
        "null keeps the config's.",
        choices=tuple(CARDS),
    )
    flops_per_s: Union[float, None] = key(
        None, "Achieved FLOP/s of one rank, for the hours; null leaves them out.", above=0, maximum=1e30
    )
    out: Union[str, None] = key(None, "JSON file for the plan; null prints only.")


@dataclass
class DoctorConfig:
    """Whether a training run would work here (`doctor`, with the overrides of `train`)."""

    out: Union[str, None] = key(None, "JSON file for what was found, without secrets; null prints only.")
