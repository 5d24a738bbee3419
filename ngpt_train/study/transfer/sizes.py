"""The arms of a study of transfer: each arm at several widths and depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.validate import mistake, show


def arms_of_sizes(
    arms: Mapping[str, Mapping[str, Any]],
    models: Mapping[str, ModelConfig],
    widths: Sequence[int],
    depths: Sequence[int],
) -> dict[str, dict[str, Any]]:
    """Each arm at each width with its own depth, and at each depth with its own width, named `ngpt-d256-L4`.

    arms: keys and values of each. models: resolved keys of each. Heads keep their width, and the MLP its share of
    d_model. Raises ConfigError for a width without a whole number of such heads.
    """
    found = {}
    for arm, row in arms.items():
        model = models[arm]
        sizes = [(width, model.n_layers) for width in widths] + [(model.d_model, depth) for depth in depths]
        for width, depth in sizes or [(model.d_model, model.n_layers)]:
            found[f"{arm}-d{width}-L{depth}"] = {**row, **_at_width(model, width), **_at_depth(model, depth)}
    return found


def _at_width(model: ModelConfig, width: int) -> dict[str, int]:
    if width == model.d_model:
        return {}
    keys = {"model.d_model": width, "model.n_heads": _scaled(model, "n_heads", width)}
    if model.n_kv_heads not in (None, model.n_heads):
        keys["model.n_kv_heads"] = _scaled(model, "n_kv_heads", width)
    if model.d_mlp not in (None, 4 * model.d_model):
        keys["model.d_mlp"] = _scaled(model, "d_mlp", width)
    return keys


def _at_depth(model: ModelConfig, depth: int) -> dict[str, int]:
    return {} if depth == model.n_layers else {"model.n_layers": depth}


def _scaled(model: ModelConfig, name: str, width: int) -> int:
    value = int(getattr(model, name))
    if value * width % model.d_model:
        problem = f"model.{name}={value} of model.d_model={model.d_model} is no whole number at {width}"
        fix = f"Choose multiples of the width of a head, {model.d_model // model.n_heads}, or set model.{name}"
        raise mistake(f"transfer.widths={show([width])}: {problem}", fix)
    return value * width // model.d_model
