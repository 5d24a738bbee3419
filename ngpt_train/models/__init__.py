"""The architectures, a folder each. ngpt_train.config reads their keys without torch; all else needs torch alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.models.parameter_groups import ParameterGroup
    from ngpt_train.models.registry import build_model
    from ngpt_train.models.weights import export_gradients, export_weights, load_weights

__all__ = ["Decoder", "ParameterGroup", "build_model", "export_gradients", "export_weights", "load_weights"]

_PLACES = {"Decoder": "decoder", "ParameterGroup": "parameter_groups", "build_model": "registry"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'weights')}"), name)
