"""A trained model, with its tokenizer, from a checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path

from ngpt_train.config import read_yaml
from ngpt_train.config.schema import Config
from ngpt_train.data import Tokenizer, read_tokenizer
from ngpt_train.distributed import World, resolve_precision
from ngpt_train.models import Decoder, build_model
from ngpt_train.training.checkpoint import find_checkpoint, load_model


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds, apart from the optimizer; `config` is that of the run."""

    path: Path
    step: int
    config: Config
    model: Decoder
    tokenizer: Tokenizer


def restore(key: str, value: str | None, precision: str, world: World) -> Restored:
    """The checkpoint that the user's `key=value` names, its model whole on this rank's device.

    Raises DataError where there is none or it is damaged.
    """
    path = find_checkpoint(key, value)
    config = read_yaml(path / "config.yaml")
    with world.device:
        model = build_model(config.model)
    model.compute_dtype = resolve_precision(precision, world.device.type)
    load_model(path, model, world)
    tokenizer = read_tokenizer(path, json.loads((path / "tokenizer.json").read_text()))
    step = json.loads((path / "state.json").read_text())["step"]  # the directory may have been renamed
    return Restored(path, step, config, model, tokenizer)
