"""Layouts: files of a model for other programs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ngpt_train.config.keys import AUTO
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import ConfigError
from ngpt_train.interop.layouts.llama import LlamaLayout, Qwen3Layout
from ngpt_train.interop.layouts.ngpt import NGPTLayout
from ngpt_train.interop.layouts.plain import SafetensorsLayout


class Layout(Protocol):
    """Writes and reads the files of one kind of program."""

    name: str
    """The value of export.layout: llama, qwen3, ngpt, safetensors."""
    for_transformers: bool
    """transformers loads the model; otherwise read_weights.py does."""

    def refusal(self, config: ModelConfig) -> str | None:
        """The key, and why this layout cannot hold the model; None if it can."""
        ...

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """config.json of transformers, without token ids and dtype."""
        ...

    def to_foreign(self, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Takes canonical names (docs/weights.md), returns the program's names. Values keep their dtype."""
        ...

    def from_foreign(
        self, config_json: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The inverse: model.* keys such as {"name": "gpt", "d_model": 64}, and canonical weights.

        Raises ConfigError or DataError if keys or weights do not fit.
        """
        ...

    def files(self) -> list[Path]:
        """Python files for the directory: a modeling file, or read_weights.py."""
        ...


# In the order of export.layout=auto.
_LAYOUTS: tuple[Layout, ...] = (LlamaLayout(), Qwen3Layout(), NGPTLayout(), SafetensorsLayout())
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _LAYOUTS}


def layout_of(config: ModelConfig) -> Layout:
    """The layout of export.layout=auto: the first one that can hold the model."""
    return next(layout for layout in LAYOUTS.values() if layout.refusal(config) is None)


def chosen_layout(name: str, config: ModelConfig) -> Layout:
    """The layout of export.layout=NAME. Raises ConfigError if it cannot hold the model."""
    if name == AUTO:
        return layout_of(config)
    if problem := LAYOUTS[name].refusal(config):
        raise ConfigError(
            f"export.layout={name}: {problem}\n  Set export.layout={layout_of(config).name}, or leave it out"
        )
    return LAYOUTS[name]
