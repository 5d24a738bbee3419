"""The base of all layouts, and the checks that foreign keys and weights make a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config, build, schema_keys
from ngpt_train.config.stored import to_dict
from ngpt_train.config.validate import check_leaf, report_together
from ngpt_train.core.errors import DataError
from ngpt_train.models import build_model
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.weights import canonical, named_weights

NOTE = "ngpt_train"  # our own entry of config.json; transformers ignores it
Json = Mapping[str, Any]  # the content of config.json
Tensors = Mapping[str, Tensor]  # by name
Keys = TypeVar("Keys", bound=ModelConfig)


class Layout:
    """Writes and reads the files of one kind of program. This one: safetensors under canonical names (docs/weights.md)
    of any architecture, with read_weights.py, which needs only numpy."""

    name = "safetensors"  # the value of export.layout
    for_transformers = False  # transformers loads the model; otherwise read_weights.py does
    objective = "next_token"  # of the models that transformers loads
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")  # of export.dtype
    returns = True  # from_foreign is the inverse of to_foreign
    files: tuple[Path, ...] = (Path(__file__).with_name("read_weights.py"),)  # Python files for the directory

    def refusal(self, config: ModelConfig) -> str | None:
        """The key, and why this layout cannot hold the model; None if it can."""
        return None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """config.json, without token ids, dtype and the layout's name."""
        return {NOTE: {"model": to_dict(Config(model=config))["model"]}}

    def to_foreign(self, weights: Tensors, config: ModelConfig) -> dict[str, Tensor]:
        """Takes canonical names, returns the program's names. Values keep their dtype."""
        return {name: weight.contiguous() for name, weight in weights.items()}

    def from_foreign(self, config_json: Json, weights: Tensors) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The inverse: keys of model.*, such as "d_model", and canonical weights. Raises ConfigError or DataError."""
        keys = config_json[NOTE].get("model")
        if isinstance(keys, dict):
            return keys, dict(weights)
        raise DataError(f"config.json: {NOTE}.model is missing: it holds the keys of model.*. Export the model again")


def checked_config(keys: Mapping[str, Any], schema: type[Keys], place: str) -> Keys:
    """The config with these model.* keys, by dotted names without `model.`. Raises ConfigError with the key and `place`
    for an unknown key, a wrong value, and values that exclude each other."""
    values = {f"model.{name}": value for name, value in keys.items()}
    for name, value in values.items():
        check_leaf(name, value, schema_keys(schema), place)
    config = build(values, schema)
    model = config.model
    assert isinstance(model, schema)
    model.n_kv_heads = model.n_heads if model.n_kv_heads is None else model.n_kv_heads
    for conflict in model.shape_conflicts():
        raise report_together(config, conflict, {})
    return model


def empty_model(config: ModelConfig, found: Tensors) -> Decoder:
    """The config's model without values, on the device meta. Raises as `check_layers`."""
    check_layers(config.n_layers, found)
    with torch.device("meta"):
        return build_model(config)


def shapes_of(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, by canonical name."""
    return {canonical(path): (rows, *x.shape[1:]) for x, parts in named_weights(model) for path, rows in parts.items()}


def is_turned(name: str) -> bool:
    """True for W_o and W_down, which other programs store transposed: they apply every matrix from the left."""
    return name.endswith((".wo", ".w_down"))


def turned(name: str, weight: Tensor) -> Tensor:
    """The weight with this canonical name as other programs store it, and the inverse."""
    return (weight.T if is_turned(name) else weight).contiguous()


def turned_shapes(config: ModelConfig, found: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each weight as other programs store it, by canonical name. Raises as `check_layers`."""
    shapes = shapes_of(empty_model(config, found))
    return {name: shape[::-1] if is_turned(name) else shape for name, shape in shapes.items()}


def check_layers(n_layers: int, found: Tensors) -> None:
    """Raises DataError if the tensors `found` are fewer than the layers: a forged config would take all memory."""
    if n_layers > len(found):
        raise DataError(f"a model of {n_layers:,} layers, but there are {len(found):,} tensors")


def check_tensors(
    found: Tensors, wanted: Mapping[str, Sequence[int]], where: str = "the weights beside config.json"
) -> None:
    """Raises DataError with every tensor that is missing or unknown, or has another shape or an integer dtype."""
    problems = [f"missing: {name} {tuple(shape)}" for name, shape in wanted.items() if name not in found]
    problems += [
        f"unknown: {name} {tuple(x.shape)}" + (", and the model has no biases" if name.endswith(".bias") else "")
        for name, x in found.items()
        if name not in wanted
    ]
    for name, x in found.items():
        if name in wanted and tuple(x.shape) != tuple(wanted[name]):
            problems.append(f"{name} has shape {tuple(x.shape)}, and should have {tuple(wanted[name])}")
        elif name in wanted and not x.is_floating_point():
            problems.append(f"{name} has dtype {x.dtype}, and should have a floating-point one")
    if problems:
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise DataError("\n  ".join([f"{where}: these tensors do not make the model", *shown]))
