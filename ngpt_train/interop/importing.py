"""Reads a model that `export` or transformers wrote, or one of the hub, and writes it as a run."""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.architectures import architectures
from ngpt_train.config.compose import load_config
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.places import new_directory
from ngpt_train.config.schema import Config, TokenizerConfig, build, schema_keys
from ngpt_train.config.stored import read_yaml, write_yaml
from ngpt_train.config.validate import any_of, check_leaf, flatten, mistake, show
from ngpt_train.core.errors import ConfigError, DataError, in_one_line
from ngpt_train.core.files import read_json, write_json
from ngpt_train.data.tokenizers import MODEL_FILES, load_tokenizer, write_tokenizer
from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.world import World
from ngpt_train.interop.exporting import CONFIG, STATISTICS
from ngpt_train.interop.layouts import LAYOUTS
from ngpt_train.interop.layouts.layout import NOTE, check_tensors, empty_model, shapes_of
from ngpt_train.interop.layouts.llama import ALSO
from ngpt_train.interop.nvidia import read_nvidia
from ngpt_train.interop.safetensors_files import read_tensors
from ngpt_train.interop.tokenizer_files import tokenizer_of
from ngpt_train.training.checkpoint.save import SPARE, Checkpoints, Snapshot
from ngpt_train.training.checkpoint.tensor_files import pieces_of
from ngpt_train.training.run_directory import origin

ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The files to fetch from the hub. None of them runs code.
FETCHED = ["*.safetensors", "*.json", "tokenizer.model", CONFIG, "ngpt_train_tokenizer/*"]
IN_FOLDERS = ["*/*.safetensors"]  # other copies of the same weights


@dataclass(frozen=True)
class Imported:
    """A model of another program as ours."""

    config: Config  # of the exported run, or else the defaults; with the model's own keys
    tensors: dict[str, Tensor]  # by canonical name, fp32; running statistics after `statistics.`
    tokenizer: Tokenizer
    form: str  # the layout, in words
    revision: str | None  # the commit of a model on the hub
    notes: list[str]  # sentences for the log


def read_model(source: str, revision: str | None, tokenizer: TokenizerConfig | None = None) -> Imported:
    """The model of import.source. tokenizer: for a checkpoint of NVIDIA's, which has none. Raises ConfigError or
    DataError if it cannot be read or its parts do not fit."""
    path, commit = Path(source).expanduser(), None
    if not path.exists() and ON_HUB.fullmatch(source):
        path, commit = _fetched(source, revision)
    elif not path.exists():
        raise DataError(f"import.source={source}: no directory, no file, and no model of the hub, which is OWNER/NAME")
    elif revision is not None:
        raise mistake(f"import.revision={revision}: {source} is on this machine", "Leave it out")
    if path.suffix in (".safetensors", ".json") and path.is_file():
        raise DataError(f"import.source={source}: one file of a model. Name its directory")
    if tokenizer is not None and path.is_dir():
        raise mistake(f"tokenizer={tokenizer.kind}: {source} has its own tokenizer", "Leave it out")
    try:
        imported = _of_nvidia(path, tokenizer) if path.is_file() else _of_directory(path, commit)
        ids, known = int(imported.config.model.vocab_size), imported.tokenizer.vocab_size
        if ids < known:
            raise DataError(f"the tokenizer has {known} ids, the model {ids}. It is not the tokenizer of this model")
        return imported
    except (ConfigError, DataError) as error:
        raise type(error)(f"import.source={source}: {error}") from None


def _of_directory(path: Path, commit: str | None) -> Imported:
    if not (path / "config.json").is_file():
        fix = "Name the directory of one, or ckpt.pt"
        if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
            fix = "It is a run already: name it in evaluate, generate, analyze, export or run.init_from"
        raise DataError(f"{path} has no config.json, so it is no model of `export` or save_pretrained\n  {fix}")
    config_json = read_json(path / "config.json")
    if not isinstance(config_json, dict):
        raise DataError(f"{path / 'config.json'} is damaged: it is no object")
    name = _layout_of(config_json)
    keys, tensors = LAYOUTS[name].from_foreign(config_json, read_tensors(path))
    stored = read_yaml(path / CONFIG) if (path / CONFIG).is_file() else None
    model = _model_config(keys, None if stored is None else stored.model)
    tokenizer, notes = tokenizer_of(path, config_json)
    config = _defaults(model) if stored is None else replace(stored, model=model)
    return Imported(config, tensors, tokenizer, f"layout {name}", commit, notes)


def _of_nvidia(path: Path, chosen: TokenizerConfig | None) -> Imported:
    keys, tensors, notes = read_nvidia(path)
    model = _model_config(keys)
    if chosen is None:
        example = "such as tokenizer=gpt2, or tokenizer=sentencepiece tokenizer.path=FILE"
        fix = f"Name the tokenizer of its training data, {example}"
        raise mistake(f"{path}: a checkpoint of NVIDIA's code holds no tokenizer", fix)
    return Imported(_defaults(model), tensors, load_tokenizer(chosen), "a checkpoint of NVIDIA's code", None, notes)


def _layout_of(config_json: Mapping[str, Any]) -> str:
    note, key = config_json.get(NOTE), "model_type"
    found = config_json.get(key)
    if isinstance(note, dict):
        key, found = f"{NOTE}.layout", note.get("layout")
    name = ALSO.get(found, found) if isinstance(found, str) else None
    if name in LAYOUTS:
        return name
    problem = f"config.json: {key}={show(found)} is not {any_of([*LAYOUTS, *ALSO])}"
    raise DataError(f"{problem}. This model cannot be imported")


def _model_config(keys: Mapping[str, Any], stored: ModelConfig | None = None) -> ModelConfig:
    """The section model.* with these keys. Raises DataError for an unknown key or a wrong value.

    stored: the section of the exported run, for keys that config.json lacks, such as dropout.
    """
    name = keys.get("name")
    if name not in architectures():
        raise DataError(f"config.json: model.name={show(name)} is not {any_of(architectures())}")
    known = schema_keys(architectures()[name])
    values = dict(flatten({"model": keys}, known))
    if stored is not None and stored.name == name:
        values = dict(flatten({"model": asdict(stored)}, known)) | values
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
    """A config with default keys, for a model without the config of its training."""
    config = load_config([f"model={model.name}", f"model.context={min(model.context, 4096)}"])
    config.scale.name = "imported"
    return replace(config, model=model)


def _fetched(source: str, revision: str | None) -> tuple[Path, str]:
    """Fetches a model from the hub. Returns its directory and its commit. Raises DataError."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(source, revision=revision, allow_patterns=FETCHED, ignore_patterns=IN_FOLDERS))
    except Exception as error:  # the library's own errors change with its version
        problem = f"{source}{f' at {revision}' if revision else ''} cannot be fetched from the hub"
        fix = "Check the name and the network, or name a directory with the model"
        raise DataError(f"import.source={source}: {problem} ({in_one_line(error)}). {fix}") from None
    return path, path.name


def write_run(imported: Imported, source: str, out: Path) -> Path:
    """Writes config.yaml, run.json and checkpoints/step_00000000 into `out`, all or nothing; returns it. Raises
    DataError if the tensors do not fit the model, or cannot be written."""
    n_params = check_weights(imported, source)
    config = config_of_run(imported, out)
    with new_directory("import.out", out) as work:

        def add_files(directory: Path) -> None:
            write_yaml(config, directory / "config.yaml")
            write_json(directory / "tokenizer.json", write_tokenizer(imported.tokenizer, directory))

        # A checkpoint has the statistics of each rank; here of a single one.
        tensors = {name: x[None] if name.startswith(STATISTICS) else x for name, x in imported.tensors.items()}
        pieces = tuple(piece for name, value in tensors.items() for piece in pieces_of(name, value))
        progress = {"step": 0, "tokens": 0, "train_seconds": 0.0, "world_size": 1, "data": {}}
        n_bytes = SPARE + sum(value.nbytes for value in tensors.values())
        world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        snapshot = Snapshot(0, pieces, n_bytes, progress, add_files, loss=None)
        Checkpoints(work / "checkpoints", world, keep_last=1, keep_every=None).write(snapshot, world)
        write_json(work / "run.json", {"starts": [_start(imported, source, n_params)], "saved": 0})
        write_yaml(config, work / "config.yaml")
    return out


def check_weights(imported: Imported, source: str) -> int:
    """The number of parameters. Raises DataError if the tensors do not fit the config or are not finite."""
    model = empty_model(imported.config.model, imported.tensors)
    statistics = {f"{STATISTICS}{name}": tuple(value.shape) for name, value in model.statistics().items()}
    check_tensors(imported.tensors, shapes_of(model) | statistics)
    for name, value in imported.tensors.items():
        if not value.isfinite().all():
            raise DataError(f"import.source={source}: {name} has values that are not finite. Copy the model again")
    return model.n_params()


def config_of_run(imported: Imported, out: Path) -> Config:
    """The imported config with the run's directory, and with the tokenizer in its checkpoint."""
    config, tokenizer = imported.config, imported.tokenizer
    config.run.root, config.run.name = str(out.parent), out.name
    config.run.init_from = None
    file = MODEL_FILES[tokenizer.kind]
    path = None if file is None else str(out.absolute() / "checkpoints" / "step_00000000" / file)
    eos = tokenizer.eos_piece if isinstance(tokenizer, HuggingFaceTokenizer) else None
    config.tokenizer = TokenizerConfig(kind=tokenizer.kind, path=path, eos=eos)
    return config


def _start(imported: Imported, source: str, n_params: int) -> dict[str, Any]:
    """The entry of run.json."""
    here = origin(torch.device("cpu"))
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": 0,
        "git_commit": here["git_commit"],
        "versions": here["versions"],
        "imported": {"source": source, "revision": imported.revision, "form": imported.form},
        "n_params": n_params,
        "data_fingerprint": "none: the model was imported",
        "tokenizer": imported.tokenizer.name,
        "tokenizer_fingerprint": imported.tokenizer.fingerprint,
    }
