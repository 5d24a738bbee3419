"""The keys train.* and kernels.*: how long, how many rows at once, in which arithmetic and by which kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from ngpt_train.config.keys import (
    AUTO,
    COUNT,
    ROWS,
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


@dataclass
class TrainConfig:
    """How long, how many tokens at once, and in which arithmetic."""

    steps: int = key(500, "Optimizer steps of the whole schedule.", **COUNT)
    stop_at: Union[int, None] = key(None, "Stop after this step without changing the schedule.", **COUNT)
    batch_rows: Union[int, None] = key(
        None, "Rows per optimizer step over all ranks; set this or batch_tokens.", **ROWS
    )
    batch_tokens: Union[int, None] = key(
        None,
        "Tokens per optimizer step over all ranks, a multiple of model.context; replaces batch_rows.",
        minimum=1,
        maximum=10_000_000_000,
    )
    micro_rows: IntOrAuto = key(
        AUTO,
        "Rows per rank in one forward pass; auto is the largest divisor of the rank's rows within 16,384 tokens.",
        **ROWS,
    )
    device: str = key(AUTO, "auto takes the GPU if there is one.", choices=(AUTO, "cpu", "cuda"))
    precision: str = key(
        AUTO,
        "Arithmetic of the matrix products; weights, norms and the loss stay fp32. auto: bf16 on GPUs, fp32 on CPUs. "
        "fp16 trains with a dynamic loss scale.",
        choices=(AUTO, "fp32", "bf16", "fp16"),
    )
    compile: BoolOrAuto = key(AUTO, "torch.compile each block; auto: on GPUs only.", choices=(AUTO,))
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
        yield from self._batch_conflicts(world_size)
        if self.cuda_graphs:
            yield from self._cuda_graphs_conflicts(config.parallel.kind, world_size)
        if self.stop_at is not None and self.stop_at > self.steps:
            yield "train.stop_at train.steps", "stops after the end", f"Set train.stop_at to {self.steps} or less"

    def _batch_conflicts(self, world_size: int) -> Iterator[Conflict]:
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
