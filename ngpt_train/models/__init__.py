"""The architectures, one folder each. ngpt_train.config imports their keys without torch; the rest needs torch alone.

A plug-in, the folder of an architecture from outside, becomes ngpt_train.models.NAME too: docs/add_an_architecture.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.config.keys import AUTO
from ngpt_train.core.errors import ConfigError

if TYPE_CHECKING:
    from ngpt_train.config.model_keys import ModelConfig
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.models.weights import export_gradients, export_weights, load_weights

__all__ = ["Decoder", "build_model", "export_gradients", "export_weights", "load_weights"]


def __getattr__(name: str) -> Any:
    """Imports these names on first use, because importing the keys must not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "decoder" if name == "Decoder" else "weights"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def build_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """The model of `config` on the current default device, with the weights that `seed` gives it. On the `meta` device
    the parameters have no values: move the model with `to_empty`, then call `init_weights_`. Raises ConfigError while
    `model.vocab_size` or another key is still `auto`, and for a model.py without `Model`."""
    if not isinstance(config.vocab_size, int):
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}: the size of the vocabulary must be known to build a model. "
            "`train` takes it from the tokenizer; elsewhere set it, for example model.vocab_size=32000."
        )
    config.settle_starts()
    if unknown := [name for name, value in vars(config).items() if value == AUTO]:
        raise ConfigError(f"model.{unknown[0]}=auto: load_config fills it in; in a config made by hand set a number.")
    module = importlib.import_module(f"{__name__}.{config.name}.model")
    if not hasattr(module, "Model"):
        raise ConfigError(f"model.name={config.name}: {module.__file__} has no class Model\n  Add: Model = YOUR_CLASS")
    model: Decoder = module.Model(config)
    if not model.embedding.is_meta:
        model.init_weights_(seed)
    return model


# Passes the folders on to the processes that this one starts: data workers unpickle a plug-in's keys.
_VARIABLE = "NGPT_TRAIN_PLUGINS"
_plugins: list[str] = []


def plugins() -> list[str]:
    """The folders of the plug-ins in use."""
    return list(_plugins)


def use_plugins(folders: Sequence[str]) -> None:
    """Makes each folder the package ngpt_train.models.NAME, NAME being the folder's; forgets the earlier plug-ins."""
    for package in [f"{__name__}.{Path(folder).name}" for folder in _plugins]:
        for module in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[module]
    _plugins[:] = folders
    os.environ[_VARIABLE] = "\n".join(folders)
    for folder in folders:
        spec = ModuleSpec(f"{__name__}.{Path(folder).name}", None, is_package=True)
        spec.submodule_search_locations = [folder]
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)


use_plugins([folder for folder in os.environ.get(_VARIABLE, "").split("\n") if folder])
