"""From a config to a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ngpt_train.config.keys import AUTO
from ngpt_train.core.errors import ConfigError

if TYPE_CHECKING:
    from ngpt_train.config.model_keys import ModelConfig
    from ngpt_train.models.decoder import Decoder


def build_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """The model of `config` on the current default device, with the weights that `seed` gives it.

    On the `meta` device the parameters have no values: move the model with `to_empty`, then call `init_weights_`.
    Raises ConfigError while `model.vocab_size` or another key is still `auto`, and for a model.py without `Model`.
    """
    if not isinstance(config.vocab_size, int):
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}: the size of the vocabulary must be known to build a model. "
            "`train` takes it from the tokenizer; elsewhere set it, for example model.vocab_size=32000."
        )
    config.settle_starts()
    if unknown := [name for name, value in vars(config).items() if value == AUTO]:
        raise ConfigError(
            f"model.{unknown[0]}=auto: load_config fills it in; in a config made by hand set it to a number."
        )
    module = importlib.import_module(f"ngpt_train.models.{config.name}.model")
    if not hasattr(module, "Model"):
        raise ConfigError(f"model.name={config.name}: {module.__file__} has no class Model\n  Add: Model = YOUR_CLASS")
    model: Decoder = module.Model(config)
    if not model.embedding.is_meta:
        model.init_weights_(seed)
    return model
