"""What a layout is: how a model is written for readers outside of ngpt-train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig


class Layout(Protocol):
    """How a model is written for readers outside of ngpt-train."""

    name: str
    """Of export.layout: llama, qwen3, ngpt, safetensors."""

    def refusal(self, config: ModelConfig) -> str | None:
        """Why a model of this config cannot be written so, in words with the key; None if it can."""
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
