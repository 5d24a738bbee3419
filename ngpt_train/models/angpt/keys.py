"""The keys of model=angpt."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ngpt_train.config.keys import key
from ngpt_train.config.model_keys import KINDS, InitConfig, ModelConfig
from ngpt_train.core.constants import Constraint
from ngpt_train.models.ngpt.keys import AlphaConfig, ReferenceSize, ScaledConfig, ScaleVectorConfig, starts_of


@dataclass
class AnGPTConfig(ScaledConfig):
    """Approximately normalized GPT (arXiv 2505.22014): nGPT with constants in the place of norms."""

    applies_dropout = True

    name: str = key("angpt", "Architecture, chosen with model=NAME.")
    # Rows start at length 1, so only directions count.
    init: InitConfig = field(default_factory=lambda: InitConfig(*["1/sqrt(d_model)"] * 3))
    s_z: ScaleVectorConfig = field(default_factory=ScaleVectorConfig)
    alpha_attn: AlphaConfig = field(default_factory=lambda: AlphaConfig(init=0.01))
    alpha_mlp: AlphaConfig = field(default_factory=lambda: AlphaConfig(init=0.01))
    reference: ReferenceSize = field(default_factory=ReferenceSize)

    starts = ModelConfig.starts + starts_of("s_z", "alpha_attn", "alpha_mlp")

    def kept_beyond_gpt(self) -> int:
        """The MLP's output, and h in fp32; but no normalised input of W_q, W_k and W_v, which read h itself."""
        return 2 * self.d_model

    @property
    def rows(self) -> Constraint:
        return "ball"

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from super().without_effect()
        yield from (("name", f"init.{kind}") for kind in KINDS)
        if "sqrt(d/d_ref)" not in self.words():
            yield "s_z.init", "reference.d_model"
