"""The keys of model=normformer."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ngpt_train.config.keys import key
from ngpt_train.config.model_keys import InitConfig, ModelConfig


class PositionKeys(ModelConfig):
    """Keys of an architecture with several kinds of positions. It declares `positions` with the kinds that it has."""

    positions: str

    @property
    def uses_rope(self) -> bool:
        return self.positions == "rotary"

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from super().without_effect()
        if not self.uses_rope:
            yield from (("positions", name) for name in ("rope_base", "rope_layout"))

    def refuses_rows_of(self, context: int) -> str | None:
        if self.positions == "learned" and context > self.context:
            return f"model.positions=learned knows the positions of {self.context} tokens"
        return super().refuses_rows_of(context)

    def not_in_weights(self) -> set[str]:
        """The learned positions are a weight of shape `(context, d_model)`, so then context must agree."""
        return super().not_in_weights() - ({"context"} if self.positions == "learned" else set())


@dataclass
class NormFormerConfig(PositionKeys):
    """Pre-LayerNorm Transformer with the extra operations of the NormFormer paper, each with a switch of its own."""

    applies_dropout = True

    name: str = key("normformer", "Architecture, chosen with model=NAME.")
    tied_embeddings: bool = key(True, "One matrix as input and output embedding.")
    # Times sqrt(d_model) the embedding has standard deviation 0.5. It is added to sinusoidal positions, which have 0.7,
    # and to normalised outputs of attention, which have 1. The authors' code has 1 here. With 1 the embedding, which is
    # the output embedding too, would give the token just read so high a logit that the loss starts above ln V.
    init: InitConfig = field(default_factory=lambda: InitConfig(embedding="0.5/sqrt(d_model)"))
    post_attn_norm: bool = key(True, "LayerNorm of the attention's output.")
    ffn_norm: bool = key(True, "LayerNorm of the MLP's hidden state, after the activation.")
    head_scale: str = key(
        "before",
        "A learned number per head: before W_O (the paper), after it (the authors' code), or none.",
        choices=("before", "after", "none"),
    )
    res_scale: bool = key(False, "ResScale: a learned number per dimension on the MLP's residual (helps to 355M).")
    qkv_norm: bool = key(False, "LayerNorm of q, k and v over all heads: row `+ 3 More LN` of Table 4.")
    bias: bool = key(True, "Biases of the matrices.")
    positions: str = key(
        "sinusoidal",
        "sinusoidal and learned are added to the embedding; rotary turns q and k.",
        choices=("sinusoidal", "learned", "rotary"),
    )
    activation: str = key("gelu", "Of the MLP without a gate: exact GELU or ReLU squared.", choices=("gelu", "relu2"))
    norm_eps: float = key(1e-5, "Added to the variance in LayerNorm.", above=0)
