"""The keys of model=powernorm."""

from collections.abc import Iterator
from dataclasses import dataclass

from ngpt_train.config.keys import AUTO, Conflict, IntOrAuto, key, nearest_divisors
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config

OVER_BATCH = ("pn", "pn_v", "batch")  # norms that take a statistic over the tokens of a batch


@dataclass
class PowerNormConfig(ModelConfig):
    """The baseline's pre-norm decoder with one of the PowerNorm paper's norms in place of RMSNorm."""

    applies_dropout = True

    name: str = key("powernorm", "Architecture, chosen with model=NAME.")
    norm: str = key(
        "pn",
        "pn: PowerNorm (Algorithm 2); pn_v: without running statistics (eq. 4-6); batch: BatchNorm; layer: LayerNorm.",
        choices=("pn", "pn_v", "batch", "layer"),
    )
    alpha_fwd: float = key(0.9, "Decay of the running statistics of the forward pass.", above=0, below=1)
    alpha_bkw: float = key(0.9, "Decay of nu, the running statistic of PowerNorm's backward pass.", above=0, below=1)
    psi_warmup_steps: IntOrAuto = key(
        AUTO,
        "Length of pn's warm-up, in which it uses the batch's statistics and is not causal; auto is "
        "schedule.warmup_steps.",
        minimum=0,
    )
    group_scaling: IntOrAuto = key(
        AUTO,
        "Layer-scale (A.1): groups of channels brought to a quadratic mean of 1 before each norm; 1 is the paper's, 0 "
        "none. auto is n_heads, as in the authors' code, and 0 before LayerNorm.",
        minimum=0,
    )
    statistics: str = key(
        "per_rank", "Statistics of a rank's own rows, or of all ranks' rows.", choices=("per_rank", "synchronised")
    )
    norm_eps: float = key(1e-5, "Added to the mean square, or the variance, in the norms.", above=0)

    @property
    def norm_over_batch(self) -> bool:
        """True if the norms take a statistic over the tokens of a batch."""
        return self.norm in OVER_BATCH

    def kept_beyond_gpt(self) -> int:
        """Each of the two norms over a batch keeps X_hat in fp32, as much as two values of half precision."""
        return 2 * 2 * self.d_model if self.norm_over_batch else 0

    @property
    def synchronises_statistics(self) -> bool:
        return self.statistics == "synchronised"

    def resolve(self, config: Config) -> None:
        if self.psi_warmup_steps == AUTO:
            self.psi_warmup_steps = config.schedule.warmup_steps if self.norm == "pn" else 0
        if self.group_scaling == AUTO:
            self.group_scaling = self.n_heads if self.norm_over_batch else 0

    def without_effect(self) -> Iterator[tuple[str, str]]:
        if self.norm != "pn":
            yield from (("norm", name) for name in ("psi_warmup_steps", "alpha_bkw"))
        if not self.norm_over_batch:
            yield from (("norm", name) for name in ("alpha_fwd", "statistics"))

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if self.group_scaling and self.d_model % int(self.group_scaling):
            fix = nearest_divisors("model.group_scaling", int(self.group_scaling), self.d_model)
            yield "model.group_scaling model.d_model", "the groups do not divide the width", fix
        if int(self.psi_warmup_steps) >= config.train.steps:
            fix = f"Set model.psi_warmup_steps below {config.train.steps}, or choose model.norm=pn_v"
            yield "model.psi_warmup_steps train.steps", "the whole run would be warm-up, which is not causal", fix
        if not self.norm_over_batch:
            return
        if config.train.cuda_graphs:
            problem = "statistics of the batch leave the graphs in the middle of a pass, which is not supported"
            yield "train.cuda_graphs model.norm", problem, "Set model.norm=layer, or train.cuda_graphs=false"
        if config.data.pack == "best_fit" and not config.data.document_mask:
            problem = "padding would enter the statistics of the batch"
            fix = "Set data.document_mask=true, or data.pack=concat"
            yield "data.pack data.document_mask model.norm", problem, fix

    def not_in_weights(self) -> set[str]:
        """Adds the keys of the running statistics, which change training but no weight's shape or meaning."""
        return super().not_in_weights() | {"psi_warmup_steps", "alpha_fwd", "alpha_bkw", "statistics"}
