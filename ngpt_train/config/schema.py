"""Every key a user can set: its type, default, meaning and limits.

One dataclass per config group. The YAML files in `configs/` choose values; `--help` prints the
sentences below; `validate.py` enforces the limits. Nothing heavy is imported here, so that a
mistake is reported before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

from ngpt_train.config import lr_table
from ngpt_train.config.data_keys import DataConfig, TokenizerConfig
from ngpt_train.config.keys import (
    AUTO,
    COUNT,
    COUNT_OR_0,
    ROWS,
    SECONDS,
    SEED,
    BoolOrAuto,
    FloatOrAuto,
    IntOrAuto,
    Table,
    key,
)
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.parallel_keys import ParallelConfig
from ngpt_train.config.verb_keys import (
    AuditConfig,
    BenchConfig,
    CompareConfig,
    DoctorConfig,
    EvalConfig,
    EvaluateConfig,
    GenerateConfig,
    PlanConfig,
    StudyConfig,
    TransferConfig,
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
class OptimConfig:
    """The optimizer. The recipe of the architecture sets these."""

    name: str = key("adamw", "Optimizer; adam never decays.", choices=("adam", "adamw"))
    lr: FloatOrAuto = key(
        AUTO, "Peak learning rate; auto looks up lr_table by scale, context and budget.", above=0, maximum=1000
    )
    # {scale: {context: lr or entries}}, which lr_table.py checks: OmegaConf fails to merge two typed dicts of dicts.
    lr_table: dict[str, Any] = key(
        {},
        "lr by scale, then context, then tokens or steps of the whole run. The longest context within model.context "
        "counts, else the shortest there is; of its entries the one with the nearest budget, by its logarithm.",
        table=Table(lr_table.problem_of, "{tiny: {256: 0.001}}", "Set optim.lr, or write a recipe in YAML"),
    )
    lr_source: str = key("", "Where optim.lr is from, which the log says. With lr=auto the entry of lr_table says it.")
    betas: list[float] = key([0.9, 0.95], "Adam's decay rates of the first and second moment.")
    eps: float = key(1e-8, "Adam's epsilon.", above=0, maximum=1)
    weight_decay: float = key(
        0.1, "Decoupled weight decay of the matrices; nGPT takes only 0.", minimum=0, maximum=1000
    )
    z_loss: float = key(
        0.0,
        "Adds this times logsumexp(logits)^2 to a target's loss in training, for example 1e-4, which keeps logits from "
        "drifting; 0: none. The losses of metrics.jsonl and of validations are without it; train records have its "
        "part as z_loss.",
        minimum=0,
        maximum=1000,
    )
    label_smoothing: float = key(
        0.0,
        "Share of a target's label that training spreads evenly over all tokens of the vocabulary, as torch's "
        "cross_entropy does; 0: none. The losses of metrics.jsonl and of validations are without it.",
        minimum=0,
        below=1,
    )
    clip_norm: Union[float, None] = key(
        1.0, "Largest global gradient norm; larger gradients are scaled down to it. null: no clipping.", above=0
    )
    storage: str = key(
        "fp32",
        "How the blocks' matrices and their moments are kept between steps. bf16: rounded after each, as parameters in "
        "bf16 without an fp32 master are, by which public comparisons trained their baseline; it saves no memory here.",
        choices=("fp32", "bf16"),
    )
    ema_decay: Union[float, None] = key(
        None,
        "Keeps a moving average of the weights: after each step ema <- ema_decay ema + (1 - ema_decay) w, for example "
        "0.999. `evaluate` and `generate` use it with evaluate.weights=ema. null: none.",
        above=0,
        below=1,
    )


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step."""

    kind: str = key(
        "cosine",
        "Shape after the warmup: cosine, linear, wsd (stable, then linear decay), constant, inverse_sqrt (falls as 1 / "
        "sqrt(step), whatever train.steps is; a warmup of 0 counts as 1), or ramp (no warmup: grows from 0 to optim.lr "
        "over train.steps, to see at which rate the loss explodes).",
        choices=("cosine", "wsd", "linear", "constant", "inverse_sqrt", "ramp"),
    )
    warmup_steps: IntOrAuto = key(
        AUTO,
        "Linear warmup; auto is min(2000, 10 % of train.steps), of a ramp 0. One that a file sets is auto where a "
        "train.steps that is set later leaves no room for it.",
        **COUNT_OR_0,
    )
    warmup_tokens: Union[int, None] = key(
        None,
        "Linear warmup in tokens, for example 375000000: rounded up to whole steps, it replaces warmup_steps.",
        minimum=0,
        maximum=1_000_000_000_000_000,
    )
    final_lr: float = key(
        0.0, "Learning rate that cosine, linear and wsd end at; the others take only 0.", minimum=0, maximum=1000
    )
    final_share: Union[float, None] = key(
        None,
        "schedule.final_lr as a share of optim.lr, for example 0.1, so that it follows a rate that is tuned.",
        minimum=0,
        maximum=1,
    )
    decay_fraction: float = key(0.2, "wsd: last part of train.steps that decays.", above=0, maximum=1)


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

    mode: str = key(AUTO, "auto: online with a key, else offline.", choices=(AUTO, "online", "offline", "disabled"))
    project: str = key("ngpt-train", "wandb project.")
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
    tensorboard: bool = key(False, "Write TensorBoard event files into the run directory as well.")
    wandb: WandbConfig = field(default_factory=WandbConfig)


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
    bench: BenchConfig = field(default_factory=BenchConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
