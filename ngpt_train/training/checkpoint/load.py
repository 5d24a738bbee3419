"""From a checkpoint to a training state, on any number of ranks and with any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import check_kinds
from ngpt_train.distributed.world import World
from ngpt_train.models.decoder import Decoder
from ngpt_train.training.checkpoint import state_tensors
from ngpt_train.training.checkpoint.catalogue import read_manifest, read_progress, verify
from ngpt_train.training.state import TrainState

if TYPE_CHECKING:
    from ngpt_train.training.checkpoint.stored_tensors import StoredTensors


def load_state(checkpoint: Path, state: TrainState, verified: bool = False) -> dict[str, Any]:
    """Loads weights, moments, averages, running statistics and counters into `state`; returns the position in the data.
    verified: True if the files have just been compared with the manifest. A collective call. Raises DataError if the
    checkpoint is damaged or of another version."""
    if not verified:
        verify(checkpoint, state.world)
    progress = read_progress(checkpoint)
    if progress["step"]:
        state_tensors.begin_moments_(state.optimizer)
    statistics = state_tensors.empty_statistics(state.model, progress["world_size"])
    read_tensors(checkpoint, state.model, {**state_tensors.held_tensors(state), "statistics": statistics})
    state_tensors.set_statistics(state.model, statistics, state.world)
    state.load_counters(progress)
    return progress["data"]


# Parameters whose size is the number of outputs.
OF_OUTPUTS = ("output", "s_z.stored", "masked_head.b_output")


def load_model(checkpoint: Path, model: Decoder, world: World, part: str = "model", new_head: bool = False) -> None:
    """Loads weights and running statistics into `model`, which has the checkpoint's architecture and size.

    part: "model" for the trained weights, "ema" for their moving average, which is not projected. Both come with the
    running statistics of training. new_head: the model has other outputs, which keep their values. A collective call.
    Raises DataError if the checkpoint is damaged, of another version, or without a moving average.
    """
    verify(checkpoint, world)
    statistics = state_tensors.empty_statistics(model, read_progress(checkpoint)["world_size"])
    weights = model.state_dict().items()  # its own memory, which `read_tensors` writes to
    read = {name: weight for name, weight in weights if not (new_head and name in OF_OUTPUTS)}
    read_tensors(checkpoint, model, {part: read, "statistics": statistics})
    state_tensors.set_statistics(model, statistics, world)


def open_tensors(checkpoint: Path) -> StoredTensors:
    """The tensors of a checkpoint. Executes nothing. Raises DataError."""
    # DCP, which reads them, imports half as much as torch. A new run reads none.
    from ngpt_train.training.checkpoint.stored_tensors import StoredTensors

    check_kinds((checkpoint / name for name in read_manifest(checkpoint)), directories=())
    return StoredTensors(checkpoint)


def read_tensors(checkpoint: Path, model: Decoder, tensors: state_tensors.Tensors) -> None:
    """Reads the checkpoint into `tensors[part][name]`. Raises DataError if the checkpoint lacks one of them."""
    stored = open_tensors(checkpoint)
    if "ema" in tensors and not any(name.startswith("ema.") for name in stored.names):
        raise DataError(f"The checkpoint {checkpoint} has no moving average: its run had optim.ema_decay=null.")
    named = state_tensors.by_canonical_name(model, tensors)
    if missing := [name for name in named if name not in stored.names]:
        raise DataError(
            f"The checkpoint {checkpoint} has no {missing[0]}: another version of ngpt-train wrote it, which called "
            "weights otherwise. Go on with that version, or begin a new run."
        )
    stored.read(named)
