"""Writes an imported model as a run directory with one checkpoint, of step 0."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch

import ngpt_train
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import TokenizerConfig
from ngpt_train.config.stored import write_yaml
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.data.tokenizers import MODEL_FILES, write_tokenizer
from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ngpt_train.distributed.world import World
from ngpt_train.interop.exporting import STATISTICS
from ngpt_train.interop.fit import check_tensors, shapes_of
from ngpt_train.interop.foreign_model import Imported
from ngpt_train.interop.new_directory import new_directory
from ngpt_train.models import build_model
from ngpt_train.training.checkpoint.save import SPARE, Checkpoints, Snapshot
from ngpt_train.training.checkpoint.tensor_files import pieces_of


def write_run(imported: Imported, source: str, out: Path) -> Path:
    """Writes config.yaml, run.json and checkpoints/step_00000000 into `out`, all or nothing; returns it.

    Raises DataError if the tensors do not fit the model, or cannot be written.
    """
    n_params = check_weights(imported, source)
    config = config_of_run(imported, out)
    with new_directory("import.out", out) as work:

        def add_files(directory: Path) -> None:
            write_yaml(config, directory / "config.yaml")
            write_json(directory / "tokenizer.json", write_tokenizer(imported.tokenizer, directory))

        # A checkpoint has the statistics of each rank; here of a single one.
        tensors = {
            name: value[None] if name.startswith(STATISTICS) else value for name, value in imported.tensors.items()
        }
        pieces = tuple(piece for name, value in tensors.items() for piece in pieces_of(name, value))
        progress = {"step": 0, "tokens": 0, "train_seconds": 0.0, "world_size": 1, "data": {}}
        n_bytes = SPARE + sum(value.nbytes for value in tensors.values())
        world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        Checkpoints(work / "checkpoints", world, keep_last=1, keep_every=None).write(
            Snapshot(0, pieces, n_bytes, progress, add_files, loss=None), world
        )
        write_json(work / "run.json", {"starts": [_start(imported, source, n_params)], "saved": 0})
        write_yaml(config, work / "config.yaml")
    return out


def check_weights(imported: Imported, source: str) -> int:
    """The number of parameters. Raises DataError if the tensors do not fit the config or are not finite."""
    shapes = shapes_of(imported.config.model, imported.tensors)
    with torch.device("meta"):
        model = build_model(imported.config.model)
    statistics = {f"{STATISTICS}{name}": tuple(value.shape) for name, value in model.statistics().items()}
    check_tensors(imported.tensors, shapes | statistics, "the weights beside config.json")
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
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": 0,
        "git_commit": git_commit(),
        "versions": {
            "ngpt_train": ngpt_train.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "imported": {"source": source, "revision": imported.revision, "form": imported.form},
        "n_params": n_params,
        "data_fingerprint": "none: the model was imported",
        "tokenizer": imported.tokenizer.name,
        "tokenizer_fingerprint": imported.tokenizer.fingerprint,
    }
