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

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder, ParameterGroup
    from ngpt_train.models.registry import build_model
    from ngpt_train.models.weights import export_gradients, export_weights, load_weights

__all__ = ["Decoder", "ParameterGroup", "build_model", "export_gradients", "export_weights", "load_weights"]

# The modules of the names above; names that are missing here are in `weights`. They are imported on first use, because
# importing the keys must not import torch.
_MODULES = {"Decoder": "decoder", "ParameterGroup": "decoder", "build_model": "registry"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'weights')}"), name)


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
