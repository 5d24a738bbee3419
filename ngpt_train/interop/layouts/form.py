"""The base of layouts whose program has one form of `composed`: keys, tensors and sizes as tables."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngpt_train.config.keys import AUTO
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.validate import show
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.layout import NOTE, Json, Layout, Tensors, check_tensors, turned, turned_shapes
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig

# Keys that any form may have: they are sizes, or mean nothing for the trained model.
FREE = {
    *("name", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_mlp", "vocab_size", "context", "psi_warmup_steps"),
    *("attn_norm_placement", "mlp_norm_placement", "init", "init_table", "deep_init", "embedding_gradient"),
    *("embedding_dropout", "residual_dropout", "attention_dropout", "activation_dropout"),
}


class FormLayout(Layout):
    """A model of `schema` with the keys `form`, as transformers' class `architecture`."""

    for_transformers = True
    files = ()
    schema: ClassVar[type[ComposedConfig | ComposedEncoderDecoderConfig]]
    architecture: ClassVar[str]
    form: ClassVar[Mapping[str, Any]]  # keys of model.*
    free: ClassVar[Collection[str]]
    sizes: ClassVar[Mapping[str, str]]  # our key for each key of config.json
    fixed: ClassVar[Mapping[str, Any]]  # the other keys of config.json
    others: ClassVar[str]  # why exports of others are not read

    def names(self, config: ModelConfig) -> dict[str, str]:
        """The program's name for each canonical name."""
        raise NotImplementedError

    def constants(self, config: ModelConfig, embedding: Tensor) -> dict[str, Tensor]:
        """Tensors of the program that are no weights of ours, in the dtype of `embedding` (vocab_size, d_model)."""
        raise NotImplementedError

    def refusal(self, config: ModelConfig) -> str | None:
        if type(config) is not self.schema:
            return f"model.name={config.name}: {self.architecture} is a form of model={self.schema().name}"
        if (n_kv_heads := config.n_kv_heads) not in (None, config.n_heads):
            return f"model.n_kv_heads={n_kv_heads}: {self.architecture} has as many as model.n_heads"
        defaults = self.schema()  # for keys of which the form says nothing
        for key in (field.name for field in dataclasses.fields(config) if field.name not in self.free):
            value, wanted = getattr(config, key), self.form.get(key, getattr(defaults, key))
            if value != wanted and not (wanted == AUTO and value == 0):
                return f"model.{key}={show(value)}: {self.architecture} has {show(wanted)}"
        if (config.placement_of("attn"), config.placement_of("mlp")) != ("post", "post"):
            return f"model.norm_placement: {self.architecture} has post in attention and MLP"
        return None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        known = {"d_mlp": 4 * config.d_model, "n_encoder_layers": config.n_layers}  # where a key is null
        values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            **{theirs: (known | values)[ours] for theirs, ours in self.sizes.items()},
            **self.fixed,
        }

    def model_keys(self, config_json: Json) -> dict[str, Any]:
        """The inverse: keys of model.*."""
        sizes = {ours: config_json[theirs] for theirs, ours in self.sizes.items()}
        return {"name": self.schema().name, **self.form, "psi_warmup_steps": 0, "group_scaling": 0, **sizes}

    def to_foreign(self, weights: Tensors, config: ModelConfig) -> dict[str, Tensor]:
        found = {place: turned(name, weights[name]) for name, place in self.names(config).items()}
        return found | self.constants(config, weights["embedding"])

    def from_foreign(self, config_json: Json, weights: Tensors) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if not isinstance(config_json.get(NOTE), dict):
            raise DataError(f"config.json: model_type={self.name}: only exports of ours are read; others {self.others}")
        keys = self.model_keys(config_json)
        config = self.schema(**keys)
        shapes, places = turned_shapes(config, weights), self.names(config)
        constants = self.constants(config, torch.empty(shapes["embedding"], device="meta"))
        wanted = {place: shapes[name] for name, place in places.items()}
        check_tensors(weights, wanted | {name: tuple(x.shape) for name, x in constants.items()})
        return keys, {name: turned(name, weights[place]) for name, place in places.items()}


def with_biases(modules: Mapping[str, str]) -> dict[str, str]:
    """The program's names of the weight and the bias of each of its modules, by canonical name.

    modules: by the canonical name of the weight; `w_u` has the bias `b_u`, and `norm_attn` the bias `norm_attn.bias`.
    """
    found: dict[str, str] = {}
    for weight, module in modules.items():
        bias = f"{weight}.bias" if "norm" in weight else re.sub(r"\bw", "b", weight)
        found |= {weight: f"{module}.weight", bias: f"{module}.bias"}
    return found
