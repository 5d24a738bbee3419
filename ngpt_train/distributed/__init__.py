"""The processes and devices of a run, and the layouts that spread a single-device model over them."""

from ngpt_train.distributed.first_contact import first_contact
from ngpt_train.distributed.layouts import (
    PRECISIONS,
    parallelize,
    resolve_compile,
    resolve_kind,
    resolve_precision,
    resolve_shard,
)
from ngpt_train.distributed.statistics import averaged_statistics
from ngpt_train.distributed.world import World, join_world, resolve_device

__all__ = [
    "PRECISIONS",
    "World",
    "averaged_statistics",
    "first_contact",
    "join_world",
    "parallelize",
    "resolve_compile",
    "resolve_device",
    "resolve_kind",
    "resolve_precision",
    "resolve_shard",
]
