"""The keys run.*, scale.*, train.*, parallel.* and kernels.*: which run this is, for how long, with how many rows at
once, in which arithmetic, on how many processes, by which kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Union

from ngpt_train.config.keys import (
    AUTO,
    COUNT,
    ROWS,
    SECONDS,
    SEED,
    BoolOrAuto,
    Conflict,
    IntOrAuto,
    key,
    nearest_divisors,
    nearest_multiples,
)
from ngpt_train.config.validate import Origin, keep_later, report_together

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

# One level of directories: multirun numbers its jobs <name>/<k>.
_PART = "[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"  # file systems take 255 bytes
_NAME = re.compile(f"{_PART}(/{_PART})?")


@dataclass
class RunConfig:
    """Identity of a run: where it lives, how it starts and when it ends."""

    may_change: ClassVar = (
        *("name", "root", "resume", "resume_step", "overwrite", "allow_change", "max_time"),
        "init_from",  # counts at step 0 alone
    )

    name: str = key(
        AUTO,
        "Directory name below run.root; auto is <model>-<scale>-seed<seed>, for a row of an experiment table "
        "<table>-<row>-<scale>-seed<seed>.",
    )
    root: str = key("runs", "Directory that holds all run directories.")
    resume: str = key(
        AUTO,
        "auto continues the newest checkpoint if there is one, must fails without one, never refuses a used directory.",
        choices=(AUTO, "must", "never"),
    )
    resume_step: Union[int, None] = key(
        None,
        "Step of the checkpoint from which the run goes on: this one or none. Those after it are put aside. It counts "
        "once for a job, not for its restarts.",
        **COUNT,
    )
    allow_change: Union[list[str], None] = key(
        None,
        "Keys of optim, schedule, train and guards, such as [optim.lr], whose new values a resumed run takes although "
        "they alter its mathematics; run.json keeps what was changed.",
    )
    overwrite: bool = key(False, "Delete what the run directory holds and start anew.")
    seed: int = key(0, "Seed of the weights and of the order of the data.", **SEED)
    init_from: Union[str, None] = key(None, "Checkpoint whose weights (nothing else) the run starts from.")
    max_time: Union[float, None] = key(
        None, "Hours after which the run saves and stops cleanly; null is no limit.", above=0, maximum=1_000_000
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that exclude each other. `name` is resolved."""
        if not _NAME.fullmatch(self.name):
            fix = "Letters, digits, '.', '_' and '-', at most one '/', parts of 200 at most, none with '.' or '-' first"
            yield "run.name", "not a directory name", fix
        if self.resume_step is not None and (self.overwrite or self.resume == "never"):
            problem = "the run is to go on, and to be deleted or refused"
            yield "run.resume_step run.overwrite run.resume", problem, "Keep one of them"
        if self.overwrite and self.resume == "must":
            yield "run.overwrite run.resume", "overwriting deletes the run that must be resumed", "Keep one of them"

    def example(self) -> str:
        """The newest run below `root`, for hints; a name to be filled in where there is none."""
        root = Path(self.root).expanduser()
        found = [path for pattern in ("*/run.json", "*/*/run.json") for path in root.glob(pattern)]
        return str(max(found, key=lambda path: path.stat().st_mtime).parent) if found else f"{root}/NAME"


@dataclass
class ScaleConfig:
    """Name of the size; the numbers it stands for are filled into model.* and train.*."""

    may_change: ClassVar = True

    name: str = key("tiny", "Name of the size, chosen with scale=NAME; part of the run's name and key of the lr table.")


@dataclass
class TrainConfig:
    """How long, how many tokens at once, and in which arithmetic."""

    may_change: ClassVar = (
        *("stop_at", "profile", "micro_rows", "device", "compile", "cuda_graphs"),
        *("deterministic", "activation_checkpointing"),
    )

    steps: int = key(500, "Optimizer steps of the whole schedule.", **COUNT)
    stop_at: Union[int, None] = key(None, "Stop after this step without changing the schedule.", **COUNT)
    batch_rows: Union[int, None] = key(None, "Rows per step over all ranks; set this or batch_tokens.", **ROWS)
    batch_tokens: Union[int, None] = key(
        None,
        "Tokens per optimizer step over all ranks, a multiple of model.context; replaces batch_rows.",
        minimum=1,
        maximum=10_000_000_000,
    )
    micro_rows: IntOrAuto = key(
        AUTO, "Rows per rank in a forward pass; auto: the largest divisor of its rows within 16,384 tokens.", **ROWS
    )
    device: str = key(AUTO, "auto takes the GPU if there is one.", choices=(AUTO, "cpu", "cuda"))
    precision: str = key(
        AUTO,
        "Arithmetic of the matrix products; weights, norms and the loss stay fp32. auto: bf16 on GPUs, fp32 on CPUs. "
        "fp16 trains with a dynamic loss scale.",
        choices=(AUTO, "fp32", "bf16", "fp16"),
    )
    compile: BoolOrAuto = key(AUTO, "torch.compile each block; auto: on GPUs only.")
    cuda_graphs: bool = key(
        False,
        "Record each compiled block as a CUDA graph, which is launched as one: for models so small that the GPU waits "
        "for launches. One process, on a GPU.",
    )
    activation_checkpointing: str = key(
        "none",
        "What the backward pass computes again to save memory, with the same result. full: each block; selective: all "
        "of a block but its matrix products and attention, which costs far less time.",
        choices=("none", "selective", "full"),
    )
    deterministic: bool = key(False, "Only algorithms that give the same bits each time; on GPUs the fastest do not.")
    profile: bool = key(False, "Write a torch profiler trace of steps 4 to 6 of this process into the run directory.")

    @property
    def rows_per_step(self) -> int:
        """batch_rows once the config is resolved, whichever of the two keys was set."""
        assert self.batch_rows is not None
        return self.batch_rows

    def resolve(self, config: Config, origins: Mapping[str, Origin]) -> None:
        """Sets both batch_rows and batch_tokens; the one that was set last counts. Raises ConfigError."""
        context, names = config.model.context, "train.batch_rows train.batch_tokens"
        if self.batch_rows is None and self.batch_tokens is None:
            fix = "Set one of them, for example train.batch_rows=16"
            raise report_together(config, (names, "no batch size", fix), origins)
        keep_later(config, names, "both set the batch size", origins)
        if self.batch_tokens is not None:
            if self.batch_tokens % context:
                fix = nearest_multiples("train.batch_tokens", self.batch_tokens, context)
                names, problem = "train.batch_tokens model.context", "the batch is no multiple of the row"
                raise report_together(config, (names, problem, fix), origins)
            self.batch_rows = self.batch_tokens // context
        self.batch_tokens = self.rows_per_step * context

    def conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        """Keys that exclude each other. world_size: the ranks that share the batch."""
        yield from self.batch_conflicts(world_size)
        if self.cuda_graphs:
            yield from self._cuda_graphs_conflicts(config.parallel.kind, world_size)
        if self.stop_at is not None and self.stop_at > self.steps:
            yield "train.stop_at train.steps", "stops after the end", f"Set train.stop_at to {self.steps} or less"

    def batch_conflicts(self, world_size: int) -> Iterator[Conflict]:
        """Of the rows: they are whole micro batches on each of `world_size` ranks."""
        rows, micro = self.rows_per_step, self.micro_rows
        ranks = f"{world_size} ranks" if world_size > 1 else "one rank"
        if isinstance(micro, int) and rows % (micro * world_size):
            names, unit = "train.batch_rows train.micro_rows", micro * world_size
            problem = f"the batch is no multiple of {micro} rows on {ranks}"
        elif rows % world_size:
            names, unit = "train.batch_rows", world_size
            problem = f"the batch cannot be shared evenly by {ranks}"
        else:
            return
        fix = nearest_multiples("train.batch_rows", rows, unit)
        if isinstance(micro, int) and rows % world_size == 0:
            fix = f"{nearest_divisors('train.micro_rows', micro, rows // world_size)}\n  {fix}"
        yield names, problem, fix

    def _cuda_graphs_conflicts(self, layout: str, world_size: int) -> Iterator[Conflict]:
        """Keys that distributed/compilation.py does not support."""
        without = "or train.cuda_graphs=false"
        if self.device == "cpu":
            yield "train.cuda_graphs train.device", "CPUs have no CUDA graphs", f"Set train.device=cuda, {without}"
        if self.compile is False:
            fix = f"Set train.compile=true, {without}"
            yield "train.cuda_graphs train.compile", "only compiled blocks are recorded", fix
        if layout in ("ddp", "fsdp", "hsdp") or world_size > 1:
            ranks = f", and there are {world_size}" if world_size > 1 else ""
            problem = f"only one process, without DDP and FSDP2{ranks}"
            yield "train.cuda_graphs parallel.kind", problem, f"Use one rank and parallel=single, {without}"


@dataclass
class KernelsConfig:
    """Which implementation of the fused operations the models use."""

    may_change: ClassVar = True

    kind: str = key(
        AUTO,
        "torch: plain PyTorch, the reference; triton: kernels for GPUs since Ampere; auto: triton where it runs.",
        choices=(AUTO, "triton", "torch"),
    )
    choose: str = key(
        "measured",
        "How auto chooses among the kernels that are right on this GPU. measured: before a run's first step each is "
        "timed on the model's shapes beside plain PyTorch, compiled as the run is, and the faster one runs; checked: "
        "all of them run. A resumed run keeps the choice.",
        choices=("measured", "checked"),
    )
    attention: str = key(
        AUTO,
        "sdpa: torch's scaled_dot_product_attention, document masks as booleans; flash_attn: the package flash-attn "
        "(2, 3 or 4), on GPUs; flex: document masks by flex_attention, on GPUs; auto: sdpa, and document masks by "
        "varlen kernels where they run.",
        choices=(AUTO, "sdpa", "flash_attn", "flex"),
    )


@dataclass
class ParallelConfig:
    """How the processes of torchrun share the work."""

    may_change: ClassVar = True

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
        "Steps between two comparisons of what several ranks hold, weights, moments and moving averages, beside the "
        "one at each save; 0 at saves alone.",
        minimum=0,
    )

    def conflicts(self, world_size: int) -> Iterator[Conflict]:
        """Keys that exclude each other on `world_size` ranks."""
        if self.kind == "single" and world_size > 1:
            problem = f"one process, but there are {world_size} ranks"
            yield "parallel.kind", problem, "Set parallel=auto, ddp, fsdp or hsdp, or use one rank"
        if isinstance(self.shard, int) and self.kind != "hsdp":
            fix = "Set parallel=hsdp, or leave parallel.shard out"
            yield "parallel.shard parallel.kind", "only hsdp has groups", fix
        elif isinstance(self.shard, int) and world_size % self.shard:
            fix = nearest_divisors("parallel.shard", self.shard, world_size)
            yield "parallel.shard", f"the groups do not divide {world_size} ranks", fix
        for name, default in (("gather", ParallelConfig.gather), ("scatter", ParallelConfig.scatter)):
            if getattr(self, name) != default and self.kind in ("single", "ddp"):
                fix = f"Set parallel=fsdp or hsdp, or leave parallel.{name} out"
                yield f"parallel.{name} parallel.kind", "every rank holds whole matrices and gradients anyway", fix
