"""Every key a user can set: its type, default, meaning and limits.

One dataclass per config group. The YAML files in `configs/` choose values; `--help` prints the
sentences below; `validate.py` enforces the limits. Nothing heavy is imported here, so that a
mistake is reported before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from ngpt_train.config.keys import (
    AUTO,
    COUNT,
    ROWS,
    SEED,
    BoolOrAuto,
    IntOrAuto,
    key,
)
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.sections.analysis import AnalyzeConfig, ProbeConfig
from ngpt_train.config.sections.data import DataConfig, TokenizerConfig
from ngpt_train.config.sections.exchange import ExportConfig, ImportConfig
from ngpt_train.config.sections.optim import OptimConfig, ScheduleConfig
from ngpt_train.config.sections.parallel import ParallelConfig
from ngpt_train.config.sections.records import CheckpointConfig, GuardsConfig, LoggingConfig
from ngpt_train.config.sections.study import AuditConfig, CompareConfig, StudyConfig, TransferConfig
from ngpt_train.config.sections.verbs import (
    DoctorConfig,
    EvalConfig,
    EvaluateConfig,
    GenerateConfig,
    PlanConfig,
)


@dataclass
class RunConfig:
    """Identity of a run: where it lives, how it starts and when it ends."""

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


@dataclass
class ScaleConfig:
    """Name of the size; the numbers it stands for are filled into model.* and train.*."""

    name: str = key("tiny", "Name of the size, chosen with scale=NAME; part of the run's name and key of the lr table.")


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


@dataclass
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    analyze: AnalyzeConfig = field(default_factory=AnalyzeConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    import_: ImportConfig = field(default_factory=ImportConfig, metadata={"named": "import"})

    if not TYPE_CHECKING:  # so that a word of Python's, which no field can have, is found by the name of its section

        def __getattr__(self, name: str) -> ImportConfig:
            if name == "import":
                return self.import_
            raise AttributeError(f"{type(self).__name__} has no section {name}")
