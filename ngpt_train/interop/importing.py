"""Reads a model that `export` or transformers wrote, or one of the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config import load_config, read_yaml
from ngpt_train.config.architectures import architectures, build, schema_keys
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.config.validate import any_of, check_leaf, flatten, show
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import read_json
from ngpt_train.data import Tokenizer
from ngpt_train.interop.exporting import CONFIG
from ngpt_train.interop.layouts.llama_config import NOTE
from ngpt_train.interop.layouts.registry import LAYOUTS
from ngpt_train.interop.tensors import read_tensors
from ngpt_train.interop.tokenizers.read import tokenizer_of
from ngpt_train.models import Decoder, build_model

ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What is fetched of a model on the hub: nothing that runs code when it is read.
FETCHED = ["*.safetensors", "*.json", "tokenizer.model", CONFIG, "ngpt_train_tokenizer/*"]
IN_FOLDERS = ["*/*.safetensors"]  # other forms of the same weights


@dataclass(frozen=True)
class Imported:
    """A model of another program as ours."""

    config: Config  # of the run that was exported, or else the defaults; with the model's own keys
    tensors: dict[str, Tensor]  # by canonical name, fp32; running statistics after `statistics.`
    tokenizer: Tokenizer
    layout: str
    revision: str | None  # the commit of a model on the hub
    notes: list[str]  # what is to be said


def read_model(source: str, revision: str | None) -> Imported:
    """The model that import.source names. Raises ConfigError or DataError for what cannot be read or does not fit."""
    path, commit = Path(source).expanduser(), None
    # INTEGRATOR: if path.is_file(): return what ngpt_train.interop.nvidia.read_nvidia(path) gives, as an Imported
    if not path.is_dir():
        if path.exists() or not ON_HUB.fullmatch(source):
            raise DataError(f"import.source={source}: no directory, and no model of the hub, which is OWNER/NAME")
        path, commit = _fetched(source, revision)
    elif revision is not None:
        raise ConfigError(f"import.revision={revision}: {source} is a directory\n  Leave it out")
    if not (path / "config.json").is_file():
        raise DataError(f"{path}: there is no config.json, so this is no model that `export` or save_pretrained wrote")
    config_json = read_json(path / "config.json")
    if not isinstance(config_json, dict):
        raise DataError(f"{path / 'config.json'} is damaged: it is no object")
    name = _layout_of(config_json)
    try:
        keys, tensors = LAYOUTS[name].from_foreign(config_json, read_tensors(path))
        model = _model_config(keys)
    except (ConfigError, DataError) as error:
        raise type(error)(f"import.source={source}: {error}") from None
    tokenizer, notes = tokenizer_of(path, config_json)
    if model.vocab_size < tokenizer.vocab_size:  # type: ignore[operator]
        raise DataError(
            f"import.source={source}: the tokenizer has {tokenizer.vocab_size} ids, the model {model.vocab_size}. It "
            "is not the tokenizer of this model"
        )
    config = read_yaml(path / CONFIG) if (path / CONFIG).is_file() else _defaults(model)
    config.model = model
    return Imported(config, tensors, tokenizer, name, commit, notes)


def built(imported: Imported) -> Decoder:
    """A model of the config on `meta`, whose weights the tensors are. Raises DataError where they are not."""
    with torch.device("meta"):
        return build_model(imported.config.model)


def _layout_of(config_json: Mapping[str, Any]) -> str:
    note = config_json.get(NOTE)
    name = note.get("layout") if isinstance(note, dict) else config_json.get("model_type")
    if name in LAYOUTS:
        return str(name)
    key = f"{NOTE}.layout" if isinstance(note, dict) else "model_type"
    raise DataError(f"config.json: {key}={show(name)} is not {any_of(LAYOUTS)}. This model cannot be imported")


def _model_config(keys: Mapping[str, Any]) -> ModelConfig:
    """The section model.* with these keys. Raises DataError for a key or value that there is not."""
    name = keys.get("name")
    if name not in architectures():
        raise DataError(f"config.json: model.name={show(name)} is not {any_of(architectures())}")
    known = schema_keys(architectures()[name])
    values = dict(flatten({"model": keys}, known))
    try:
        for key, value in values.items():
            check_leaf(key, value, known)
    except ConfigError as error:
        raise DataError(f"config.json: {error}") from None
    model = build(values, architectures()[name]).model
    if not isinstance(model.vocab_size, int):
        raise DataError("config.json: model.vocab_size=auto, but an exported model has its number")
    return model


def _defaults(model: ModelConfig) -> Config:
    """The config of a run of which nobody knows how it was trained."""
    config = load_config([f"model={model.name}", f"model.context={min(model.context, 4096)}"])
    config.scale.name = "imported"
    return config


def _fetched(source: str, revision: str | None) -> tuple[Path, str]:
    """The files of a model on the hub, on this machine, and their commit. Raises DataError."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(source, revision=revision, allow_patterns=FETCHED, ignore_patterns=IN_FOLDERS))
    except Exception as error:  # of the hub, of the network, of the disk; each version has its own
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        at = "" if revision is None else f" at {revision}"
        raise DataError(
            f"import.source={source}: {source}{at} cannot be fetched from the hub ({problem}). Check the name and the "
            "network, or name a directory with the model"
        ) from None
    return path, path.name
