"""From a checkpoint to a training state, on any number of ranks and with any layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json
from ngpt_train.distributed import World
from ngpt_train.models import Decoder
from ngpt_train.training.checkpoint.files import MANIFEST, size_and_sha256
from ngpt_train.training.checkpoint.tensors import (
    OPTIONS,
    moving_average,
    no_dist,
    set_statistics,
    statistics_to_load,
    without_process_group_warning,
)
from ngpt_train.training.state import TrainState


def verify(checkpoint: Path, world: World) -> None:
    """Compares every file with the manifest; a collective call, in which each rank reads some files.

    Raises DataError, on every rank, which names the files that differ.
    """
    files = read_json(checkpoint / MANIFEST)["files"]
    problems = []
    for index, (name, expected) in enumerate(files.items()):
        if index % world.size == world.rank:
            path = checkpoint / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != expected["bytes"]:
                problems.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
            elif size_and_sha256(path) != expected:
                problems.append(f"{name} has another sha256 than when it was written")
    found = [problem for part in world.gather(problems) for problem in part]
    if found:
        raise DataError(
            f"The checkpoint {checkpoint} is damaged: {'; '.join(found)}. "
            "Delete this directory to continue from the one before it."
        )


def check_names(checkpoint: Path, weights: Mapping[str, Any], part: str = "model") -> None:
    """Raises DataError if a weight of the model is not in that part of the checkpoint under its name."""
    known = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    if part == "ema" and not any(name.startswith("ema.") for name in known):
        raise DataError(f"The checkpoint {checkpoint} has no moving average: its run had optim.ema_decay=null.")
    if missing := [name for name in weights if f"{part}.{name}" not in known]:
        raise DataError(
            f"The checkpoint {checkpoint} has no {missing[0]}: another version of ngpt-train wrote it, which called "
            "weights otherwise. Go on with that version, or begin a new run."
        )


def load_state(checkpoint: Path, state: TrainState) -> dict[str, Any]:
    """Loads weights, moments, averages, running statistics and counters into `state`; returns the position in the data.

    A collective call. Raises DataError if the checkpoint is damaged or of another version.
    """
    verify(checkpoint, state.world)
    model, optimizer = get_state_dict(state.model, state.optimizer, options=OPTIONS)
    check_names(checkpoint, model)
    tensors: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "statistics": statistics_to_load(checkpoint, state.model),
        **moving_average(state),
    }
    if state.ema is not None:
        check_names(checkpoint, state.ema.weights, "ema")
    with without_process_group_warning():
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=no_dist())
    set_statistics(state.model, tensors["statistics"], state.world)
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=OPTIONS)
    progress = read_json(checkpoint / "state.json")
    state.step = progress["step"]
    state.tokens.fill_(progress["tokens"])
    state.train_seconds = progress.get("train_seconds")  # earlier versions did not save it
    if "interval" in progress:  # earlier versions did not save it
        state.interval.load_state_dict(progress["interval"])
    if state.loss_scale is not None:
        state.loss_scale.load_state_dict(progress["loss_scale"])
    return progress["data"]


def load_model(checkpoint: Path, model: Decoder, world: World, part: str = "model") -> None:
    """Loads weights and running statistics into `model`, which has the architecture and size of the checkpoint's.

    part: "model" for the trained weights, "ema" for their moving average, which is not projected. The running
    statistics are those of training in both cases. A collective call. Raises DataError if the checkpoint is damaged, of
    another version, or without a moving average.
    """
    verify(checkpoint, world)
    tensors: dict[str, Any] = {
        part: get_model_state_dict(model),
        "statistics": statistics_to_load(checkpoint, model),
    }
    check_names(checkpoint, tensors[part], part)
    with without_process_group_warning():
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=no_dist())
    set_statistics(model, tensors["statistics"], world)
    set_model_state_dict(model, tensors[part])
