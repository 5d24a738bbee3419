"""From a config to a model."""

from collections.abc import Callable
from typing import Any

from ngpt_train.config.schema import ConfigError, GPTConfig, ModelConfig, NGPTConfig
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.gpt import GPT
from ngpt_train.models.ngpt import NGPT

ARCHITECTURES: dict[type[ModelConfig], Callable[[Any], Decoder]] = {GPTConfig: GPT, NGPTConfig: NGPT}


def build_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """The model of `config` on the current default device, its weights drawn from `seed`.

    On the `meta` device it has shapes only; `init_weights_` fills it once it is somewhere.
    Raises ConfigError while `model.vocab_size` is still `auto`.
    """
    if not isinstance(config.vocab_size, int):
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}: the size of the vocabulary must be known to build a model. "
            "`train` takes it from the tokenizer; elsewhere set it, for example model.vocab_size=32000."
        )
    model = ARCHITECTURES[type(config)](config)
    if not model.embedding.is_meta:
        model.init_weights_(seed)
    return model
