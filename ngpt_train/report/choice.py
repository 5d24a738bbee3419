"""Micro rows, recomputation and layout for a card's memory, by the memory that `plan` predicts."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.verbs import CARDS
from ngpt_train.core.errors import ConfigError
from ngpt_train.distributed.layouts import resolve_compile, resolve_kind, resolve_precision, resolve_shard
from ngpt_train.models import build_model
from ngpt_train.models.decoder import Decoder
from ngpt_train.report.memory import Layout, memory_per_rank
from ngpt_train.training.feed import divisors, resolve_micro_rows

RECOMPUTATIONS = ["none", "selective", "full"]
LAYOUT_KEYS = {"parallel", "parallel.kind", "parallel.shard"}  # arguments for the layout
GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """config: the given one with the choice. overrides: the choice as arguments. predicted, limit: bytes of a rank."""

    config: Config
    overrides: list[str]
    predicted: int
    limit: int


def choose(config: Config, overrides: Sequence[str] = ()) -> Choice:
    """Micro rows, recomputation and layout for plan.world_size ranks on cards of the kind plan.device.

    A choice fits if `plan` predicts at most 90 % of the card's memory for a rank, less 2 GiB for the driver and NCCL.
    `choose` takes the first choice that fits, in this order:

    1. no recomputation, then `selective`, then `full`;
    2. `ddp`, then shards: `fsdp` on one host, on several `hsdp` with a host's ranks as a group;
    3. the most micro rows that divide a rank's rows.

    The settings in `overrides`, the user's arguments, are kept. The config is resolved, with a number as
    `model.vocab_size`. Raises ConfigError for train.device=cpu, and if nothing fits, with the least memory needed.
    """
    device = config.plan.device
    assert device is not None
    if config.train.device == "cpu":
        raise ConfigError(f"plan.device={device}: train.device=cpu uses no GPU. Leave one of the two out.")
    limit = round(0.9 * (CARDS[device] - 2) * GIB)
    with torch.device("meta"):
        model = build_model(config.model)
    given = {one.partition("=")[0].strip() for one in overrides}
    least: list[tuple[int, Config]] = []
    for candidate in _recomputations_and_layouts(config, given):
        rows = [planned_layout(candidate).micro_rows]  # raises ConfigError where ranks cannot share the rows
        if "train.micro_rows" not in given:
            rows = divisors(config.train.rows_per_step // config.plan.world_size)
        predict = partial(_predicted, candidate, model)
        # With a single micro batch gradients take less, so the most rows may fit where fewer do not.
        all_fit = predict(rows[-1]) <= limit
        fitting = rows if all_fit else rows[: bisect_right(rows[:-1], limit, key=predict)]
        if fitting:
            chosen = _with_rows(candidate, fitting[-1])
            return Choice(chosen, _as_arguments(chosen, given), predict(fitting[-1]), limit)
        least.append((predict(rows[0]), _with_rows(candidate, rows[0])))
    needed, with_least = min(least, key=lambda one: one[0])
    raise ConfigError(
        f"plan.device={device}: nothing fits on {config.plan.world_size} of them: the smallest, "
        f"{' '.join(_as_arguments(with_least))}, needs {needed / GIB:.1f} GiB a rank, and "
        f"{limit / GIB:.1f} GiB of the card's {CARDS[device]} may be planned. Plan for more ranks, a larger card or "
        "fewer tokens of context, or leave out what keeps it from recomputing or sharding."
    )


def planned_layout(config: Config) -> Layout:
    """The layout of a rank of plan.world_size, on GPUs unless train.device=cpu. Raises ConfigError if there is none."""
    world_size, device = config.plan.world_size, "cpu" if config.train.device == "cpu" else "cuda"
    micro_rows = resolve_micro_rows(config, world_size)
    ranks_per_host = min(world_size, config.plan.ranks_per_host)
    kind = resolve_kind(config.parallel.kind, world_size, device, ranks_per_host)
    return Layout(
        kind,
        n_shards=resolve_shard(config.parallel, kind, world_size, ranks_per_host),
        dtype=resolve_precision(config.train.precision, device),
        compiled=resolve_compile(config.train.compile, device),
        micro_rows=micro_rows,
        micro_batches=config.train.rows_per_step // (micro_rows * world_size),
        fused_adam=(config.kernels.kind == "triton" or (config.kernels.kind == AUTO and device == "cuda"))
        and config.optim.gate_power is None,
        on_gpu=device == "cuda",
    )


def _recomputations_and_layouts(config: Config, given: set[str]) -> Iterator[Config]:
    """The config with each possible recomputation and layout, in the order of preference."""
    of_shards = "hsdp" if 1 < config.plan.ranks_per_host < config.plan.world_size else "fsdp"
    recomputations, kinds = RECOMPUTATIONS, ["ddp", of_shards]
    if "train.activation_checkpointing" in given:
        recomputations = [config.train.activation_checkpointing]
    if given & LAYOUT_KEYS:
        kinds = [config.parallel.kind]
    elif config.plan.world_size == 1:
        kinds = ["single"]
    elif config.parallel.gather != "pass" or config.parallel.scatter != "micro_batch":
        kinds = [of_shards]  # these keys are for shards
    for recompute, kind in product(recomputations, kinds):
        train = replace(config.train, activation_checkpointing=recompute)
        yield replace(config, train=train, parallel=replace(config.parallel, kind=kind))


def _with_rows(config: Config, micro_rows: int) -> Config:
    return replace(config, train=replace(config.train, micro_rows=micro_rows))


def _predicted(config: Config, model: Decoder, micro_rows: int) -> int:
    """Bytes of a rank with so many micro rows."""
    config = _with_rows(config, micro_rows)
    return sum(item.bytes for item in memory_per_rank(config, model, planned_layout(config)))


def _as_arguments(config: Config, given: Set[str] = frozenset()) -> list[str]:
    """The choice as arguments, without the user's own."""
    chosen = {f"train.{name}": getattr(config.train, name) for name in ("micro_rows", "activation_checkpointing")}
    chosen |= {} if given & LAYOUT_KEYS else {"parallel": config.parallel.kind}
    return [f"{name}={value}" for name, value in chosen.items() if name not in given]
