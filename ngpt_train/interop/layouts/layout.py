"""Layouts: the forms in which a model is written for readers outside of ngpt-train, and their names."""

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
    """The form in which a model is written for one kind of reader."""

    name: str
    """The value of export.layout: llama, qwen3, ngpt, safetensors."""

    def refusal(self, config: ModelConfig) -> str | None:
        """The reason, with the key, for which a model of this config cannot be written so; None if it can."""
        ...

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """config.json of transformers, without token ids and dtype."""
        ...

    def to_foreign(self, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Canonical names (docs/weights.md) -> the reader's; values keep their dtype."""
        ...

    def from_foreign(
        self, config_json: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The way back: model.* keys such as {"name": "gpt", "d_model": 64}, and canonical weights.

        Raises ConfigError or DataError for what does not fit.
        """
        ...

    def files(self) -> list[Path]:
        """Further files that belong beside config.json (a modeling file)."""
        ...


# auto takes the first that can hold the model.
_LAYOUTS: tuple[Layout, ...] = (LlamaLayout(), Qwen3Layout(), NGPTLayout(), SafetensorsLayout())
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _LAYOUTS}


def layout_of(config: ModelConfig) -> Layout:
    """The layout of export.layout=auto: that of the readers that most people have."""
    return next(layout for layout in LAYOUTS.values() if layout.refusal(config) is None)


def chosen_layout(name: str, config: ModelConfig) -> Layout:
    """The layout that export.layout names. Raises ConfigError where it cannot hold the model."""
    if name == AUTO:
        return layout_of(config)
    if problem := LAYOUTS[name].refusal(config):
        raise ConfigError(
            f"export.layout={name}: {problem}\n  Set export.layout={layout_of(config).name}, or leave it out"
        )
    return LAYOUTS[name]
