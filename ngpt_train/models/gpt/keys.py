"""The keys of model=gpt."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import Conflict, key
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config


@dataclass
class GPTConfig(ModelConfig):
    """The baseline, like Llama: RMSNorm, RoPE, SwiGLU, untied embeddings, no biases."""

    applies_dropout = True

    name: str = key("gpt", "Architecture, chosen with model=NAME.")
    norm_eps: float = key(1e-6, "Added to the mean square in RMSNorm.", above=0)
    qk_norm: bool = key(False, "RMSNorm with gain over each head of q and k, before RoPE.")
    logit_soft_cap: Union[float, None] = key(
        None, "Logits z become c tanh(z / c) with this c, for example 30; null: no cap.", above=0, maximum=1000
    )
    mlp: str = key("gated", "gated: (x W_u * act(x W_v)) W_down; plain: act(x W_u) W_down.", choices=("gated", "plain"))
    activation: str = key(
        "silu",
        "act of the MLP: SiLU, the exact GELU, or ReLU squared, which the plain MLP alone takes.",
        choices=("silu", "gelu", "relu2"),
    )

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        yield from super().conflicts(config)
        if self.mlp == "gated" and self.activation == "relu2":
            fix = "Set model.mlp=plain, or model.activation=silu or gelu"
            yield "model.activation model.mlp", "there is no gate of ReLU squared", fix
