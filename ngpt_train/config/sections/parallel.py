"""The keys parallel.*: how processes share the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ngpt_train.config.keys import AUTO, SECONDS, Conflict, IntOrAuto, key, nearest_divisors


@dataclass
class ParallelConfig:
    """How the processes of torchrun share the work."""

    kind: str = key(
        AUTO,
        "single: one process; ddp: a replica per rank; fsdp: parameters sharded over all ranks (FSDP2); hsdp: sharded "
        "over groups of parallel.shard ranks, which are replicas of each other. auto: single on one process, else ddp "
        "on CPUs, and on GPUs fsdp on one host and hsdp on several.",
        choices=(AUTO, "single", "ddp", "fsdp", "hsdp"),
    )
    shard: IntOrAuto = key(AUTO, "hsdp: ranks of a group; auto: the ranks of a host.", minimum=2, maximum=1_000_000)
    gather: str = key(
        "pass",
        "fsdp and hsdp: how often the ranks put the matrices of a block together. pass: in each forward and each "
        "backward pass; micro_batch: in the forward pass, and the backward pass finds them there; step: once for all "
        "micro batches of a step. The last two say less and hold whole matrices meanwhile.",
        choices=("pass", "micro_batch", "step"),
    )
    scatter: str = key(
        "micro_batch",
        "fsdp and hsdp: how often the ranks add up their gradients, of which each then holds its shard. step: once for "
        "all micro batches of a step, which says less and holds whole gradients, 4 bytes a parameter, meanwhile.",
        choices=("micro_batch", "step"),
    )
    timeout: float = key(
        600.0,
        "Seconds that a rank waits for the others before it gives up; data.fetch_minutes more while text of the hub is "
        "streamed.",
        **SECONDS,
    )
    hang_seconds: float = key(
        30.0,
        "Seconds without a sign of life after which a rank counts as hung. Then all ranks print their Python stacks "
        "and end, and torchrun may start them again. A step hangs after 1.5 times these seconds, and 20 times the "
        "longest step before. 0: never.",
        minimum=0,
        maximum=86_400,
    )
    check_replicas: int = key(
        1000,
        "Steps between two comparisons of what several ranks hold, weights and moments, beside the one at each save; 0 "
        "at saves alone.",
        minimum=0,
    )

    def conflicts(self, world_size: int) -> Iterator[Conflict]:
        """Keys that exclude each other on `world_size` ranks."""
        if self.kind == "single" and world_size > 1:
            problem = f"one process, but there are {world_size} ranks"
            yield "parallel.kind", problem, "Set parallel=auto, ddp, fsdp or hsdp, or use one rank"
        if isinstance(self.shard, int) and self.kind != "hsdp":
            yield (
                "parallel.shard parallel.kind",
                "only hsdp has groups",
                "Set parallel=hsdp, or leave parallel.shard out",
            )
        elif isinstance(self.shard, int) and world_size % self.shard:
            fix = nearest_divisors("parallel.shard", self.shard, world_size)
            yield "parallel.shard", f"the groups do not divide {world_size} ranks", fix
        for name, default in (("gather", ParallelConfig.gather), ("scatter", ParallelConfig.scatter)):
            if getattr(self, name) != default and self.kind in ("single", "ddp"):
                fix = f"Set parallel=fsdp or hsdp, or leave parallel.{name} out"
                yield f"parallel.{name} parallel.kind", "every rank holds whole matrices and gradients anyway", fix
