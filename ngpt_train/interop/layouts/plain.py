"""Any architecture as safetensors under canonical names, with read_weights.py, which needs only numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import to_dict
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.llama_config import NOTE


class SafetensorsLayout:
    """Canonical names and shapes: docs/weights.md. transformers does not load it."""

    name = "safetensors"
    for_transformers = False

    def refusal(self, config: ModelConfig) -> str | None:
        return None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        return {NOTE: {"layout": self.name, "model": to_dict(Config(model=config))["model"]}}

    def to_foreign(self, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        return {name: weight.contiguous() for name, weight in weights.items()}

    def from_foreign(
        self, config_json: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        keys = config_json[NOTE].get("model")
        if not isinstance(keys, dict):
            raise DataError(
                f"config.json: {NOTE}.model is missing: it holds the keys of model.*. Export the model again"
            )
        return keys, dict(weights)

    def files(self) -> list[Path]:
        return [Path(__file__).with_name("read_weights.py")]
