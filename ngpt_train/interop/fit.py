"""Checks that foreign keys and weights make a model."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import build, schema_keys
from ngpt_train.config.validate import check_leaf, report_together
from ngpt_train.core.errors import DataError
from ngpt_train.models import build_model
from ngpt_train.models.weights import canonical, named_weights

Keys = TypeVar("Keys", bound=ModelConfig)


def checked_config(keys: Mapping[str, Any], schema: type[Keys], place: str) -> Keys:
    """The config with these model.* keys, by dotted names without `model.`.

    Raises ConfigError with the key and `place` for an unknown key, a wrong value, and values that exclude each other.
    """
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


def shapes_of(config: ModelConfig, found: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of the config's model, by canonical name.

    Raises DataError if the tensors `found` are fewer than the blocks: a forged config would take all memory.
    """
    check_layers(config.n_layers, found)
    with torch.device("meta"):
        model = build_model(config)
    return {
        canonical(path): (rows, *parameter.shape[1:])
        for parameter, parts in named_weights(model)
        for path, rows in parts.items()
    }


def check_layers(n_layers: int, found: Mapping[str, Tensor]) -> None:
    if n_layers > len(found):
        raise DataError(f"a model of {n_layers:,} layers, but there are {len(found):,} tensors")


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Sequence[int]], where: str) -> None:
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
