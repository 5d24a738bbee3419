"""The keys that say how processes share the work."""

from __future__ import annotations

from dataclasses import dataclass

from ngpt_train.config.keys import AUTO, SECONDS, IntOrAuto, key


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
    shard: IntOrAuto = key(AUTO, "hsdp: ranks of a group; auto: those of a host.", minimum=2, maximum=1_000_000)
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
