"""From a checkpoint to a training state, on any number of ranks and with any layout."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import check_kinds
from ngpt_train.distributed import World
from ngpt_train.models import Decoder
from ngpt_train.training.checkpoint.files import differences, has_tensors, read_manifest, read_progress
from ngpt_train.training.checkpoint.metadata import read_metadata
from ngpt_train.training.checkpoint.names import by_canonical_name, names_parameters
from ngpt_train.training.checkpoint.reading import StoredTensors
from ngpt_train.training.checkpoint.tensors import (
    OPTIONS,
    describe_error,
    moving_average,
    no_dist,
    set_statistics,
    statistics_to_load,
    without_process_group_warning,
)
from ngpt_train.training.state import TrainState


def verify(checkpoint: Path, world: World) -> None:
    """Compares every file with the manifest, and the step with the directory's name; a collective call, in which each
    rank reads some files.

    Raises DataError, on every rank, which names what differs.
    """
    files = world.on_main(lambda: read_manifest(checkpoint)).files  # so that all see the same, and none is left alone
    mine = {name: entry for index, (name, entry) in enumerate(files.items()) if index % world.size == world.rank}
    own = world.on_all_without_timeout(lambda: differences(checkpoint, mine))  # of a slow disk it takes long
    found = [problem for part in world.gather(own) for problem in part]
    if found:
        raise DataError(f"The checkpoint {checkpoint} is damaged: {'; '.join(found)}. Use another checkpoint.")
    world.on_main(lambda: read_progress(checkpoint))


def newest_with_config(checkpoints: Sequence[Path]) -> Path | None:
    """The newest of `checkpoints`, the oldest first, whose config and tokenizer are what its manifest says; the newest
    of all if there is none. No collective call, and quick: the files of tensors are not read."""
    for checkpoint in reversed(checkpoints):
        with contextlib.suppress(DataError):
            files = read_manifest(checkpoint).files
            small = {name: entry for name, entry in files.items() if not has_tensors(name)}
            read_progress(checkpoint)
            if not differences(checkpoint, small):
                return checkpoint
    return checkpoints[-1] if checkpoints else None


def newest_undamaged(checkpoints: Sequence[Path], world: World) -> tuple[Path | None, dict[str, str]]:
    """The newest of `checkpoints`, the oldest first, whose files are what its manifest says, and what is wrong with
    those that are newer, by name.

    A collective call. Raises the newest one's DataError if all are damaged; none at all give None.
    """
    damaged: dict[str, str] = {}
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint, world)
        except DataError as error:
            damaged[checkpoint.name] = str(error)
        else:
            return checkpoint, damaged
    if damaged:
        newest = next(iter(damaged.values()))
        older = f" So are the {len(damaged) - 1} older ones." if len(damaged) > 1 else " There is no older one."
        raise DataError(newest + older)
    return None, damaged


class TensorsOfBefore:
    """The tensors of a checkpoint of format 1, in torch's own files."""

    def __init__(self, checkpoint: Path, files: set[str]) -> None:
        """files: those that the manifest names. Raises DataError."""
        self.checkpoint = checkpoint
        self._stored = read_metadata(checkpoint, files).state_dict_metadata
        self.names = self._stored.keys()

    def sizes(self) -> list[int]:
        """As StoredTensors.sizes."""
        return [entry.size.numel() for entry in self._stored.values() if isinstance(entry, TensorStorageMetadata)]

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """As StoredTensors.read; a collective call."""
        try:
            with without_process_group_warning():
                dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(self.checkpoint), no_dist=no_dist())
        except (RuntimeError, ValueError, CheckpointException) as error:
            raise DataError(f"The checkpoint {self.checkpoint} cannot be read: {describe_error(error)}") from None


def open_tensors(checkpoint: Path) -> StoredTensors | TensorsOfBefore:
    """The tensors of a checkpoint. Executes nothing. Raises DataError."""
    manifest = read_manifest(checkpoint)
    check_kinds((checkpoint / name for name in manifest.files), directories=())
    return TensorsOfBefore(checkpoint, set(manifest.files)) if manifest.format == 1 else StoredTensors(checkpoint)


def as_stored(
    checkpoint: Path, known: Collection[str], model: Decoder, tensors: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """`tensors`, by part of the state and name, as the checkpoint names them, whose names are `known`.

    What is read into them is in `tensors`. Raises DataError if one is not in the checkpoint.
    """
    if "ema" in tensors and not any(name.startswith("ema.") for name in known):
        raise DataError(f"The checkpoint {checkpoint} has no moving average: its run had optim.ema_decay=null.")
    if names_parameters(known):
        named = {f"{part}.{name}": value for part, of_part in tensors.items() for name, value in of_part.items()}
    else:
        named = by_canonical_name(model, tensors)
    if missing := [name for name in named if name not in known]:
        raise DataError(
            f"The checkpoint {checkpoint} has no {missing[0]}: another version of ngpt-train wrote it, which called "
            "weights otherwise. Go on with that version, or begin a new run."
        )
    return named


def load_state(checkpoint: Path, state: TrainState, verified: bool = False) -> dict[str, Any]:
    """Loads weights, moments, averages, running statistics and counters into `state`; returns the position in the data.

    verified: the files have just been compared with the manifest. A collective call. Raises DataError if the checkpoint
    is damaged or of another version.
    """
    if not verified:
        verify(checkpoint, state.world)
    progress = read_progress(checkpoint)
    model, optimizer = get_state_dict(state.model, state.optimizer, options=OPTIONS)
    stored = open_tensors(checkpoint)
    tensors: dict[str, Any] = {
        "model": model,
        # Without the groups' learning rates and the like, which the config has: DCP would unpickle them.
        "optimizer": {name: value for name, value in optimizer.items() if isinstance(value, Tensor)},
        "statistics": statistics_to_load(checkpoint, state.model),
        **moving_average(state),
    }
    stored.read(as_stored(checkpoint, stored.names, state.model, tensors))
    set_statistics(state.model, tensors["statistics"], state.world)
    optimizer |= tensors["optimizer"]
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=OPTIONS)
    state.step = progress["step"]
    state.tokens.fill_(progress["tokens"])
    state.train_seconds = progress.get("train_seconds")  # earlier versions did not save it
    if "interval" in progress:  # earlier versions did not save it
        state.interval.load_state_dict(progress["interval"])
    state.guards.load_state_dict(progress.get("guards", {}))
    state.rollbacks = progress.get("rollbacks", [])
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
    stored = open_tensors(checkpoint)
    stored.read(as_stored(checkpoint, stored.names, model, tensors))
    set_statistics(model, tensors["statistics"], world)
    set_model_state_dict(model, tensors[part])
