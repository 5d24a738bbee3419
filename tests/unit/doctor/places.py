"""Answers of invented ranks."""

from typing import Any

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.doctor.findings import Answer, Place


def hosts(n_hosts: int, ranks_of_each: int = 1) -> list[Place]:
    size = n_hosts * ranks_of_each
    return [
        Place(rank, size, rank % ranks_of_each, ranks_of_each, rank // ranks_of_each, "abcdefgh"[rank // ranks_of_each])
        for rank in range(size)
    ]


def answers(places: list[Place], *facts: dict[str, Any]) -> list[Answer]:
    """The answers of `places`; further places share the last facts."""
    return [Answer(place, facts[min(place.rank, len(facts) - 1)]) for place in places]


def config(*overrides: str) -> Config:
    defaults = ["model=ngpt", "scale=debug", "tokenizer=bytes", "logging.wandb.mode=disabled"]
    chosen = {override.split("=")[0]: override for override in [*defaults, *overrides]}
    return load_config(list(chosen.values()), world_size=1)
