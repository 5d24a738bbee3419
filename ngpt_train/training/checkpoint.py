"""Checkpoints that are complete or absent.

    checkpoints/step_00001000/   __0_0.distcp ...  sharded tensors (torch.distributed.checkpoint)
                                 .metadata         the place of each tensor in those files
                                 state.json        counters, sums since the last record, position in the data
                                 config.yaml, tokenizer files
                                 MANIFEST.json     size and sha256 of every file; written last

A checkpoint is written under another name, synced to disk and then renamed, so that a kill at any moment leaves the
previous checkpoint. It can be read on any number of ranks and with any layout.
"""

import hashlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, sync, write_json
from ngpt_train.distributed import World
from ngpt_train.models import Decoder
from ngpt_train.training.state import TrainState

logger = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".unfinished-"


class Checkpoints:
    """The checkpoints of one run, in `directory`."""

    def __init__(self, directory: Path, world: World, keep_last: int, keep_every: int | None) -> None:
        self.directory = directory
        self.world = world
        self.keep_last = keep_last
        self.keep_every = keep_every

    def save(self, state: TrainState, position: Mapping[str, Any], add_files: Callable[[Path], None]) -> Path:
        """Saves `state` and the position in the data; a collective call.

        `add_files` writes further files into the directory of the checkpoint. Raises DataError, on every rank, if the
        checkpoint could not be written; earlier checkpoints are then untouched.
        """
        final = self.directory / f"step_{state.step:08d}"
        work = self.directory / f"{_UNFINISHED}{final.name}"
        problem: str | None = None
        sums: dict[str, dict[str, Any]] = {}
        try:
            self._write(work, state, position, add_files)
            sums = self._checksums(work)
        except (Exception, CheckpointException) as error:  # CheckpointException is not a subclass of Exception
            problem = _describe_error(error)
        outcomes = self.world.gather((problem, sums))
        problem = next((found for found, _ in outcomes if found), None)
        if problem is None:
            files = {name: entry for _, part in outcomes for name, entry in part.items()}
            problem = self.world.on_main(lambda: self._commit(work, final, files))
        if problem is not None:
            self.world.on_main(lambda: shutil.rmtree(work, ignore_errors=True))
            raise DataError(f"The checkpoint {final} could not be written: {problem}.")
        self.world.on_main(self._prune)
        return final

    def _write(
        self, work: Path, state: TrainState, position: Mapping[str, Any], add_files: Callable[[Path], None]
    ) -> None:
        self.world.on_main(lambda: _make_empty(work))
        model, optimizer = get_state_dict(state.model, state.optimizer, options=_OPTIONS)
        writer = dcp.FileSystemWriter(work, sync_files=True)  # every file is fsynced
        with _without_process_group_warning():
            tensors: dict[str, Any] = {
                "model": model,
                "optimizer": optimizer,
                "statistics": _statistics_of_all_ranks(state.model, self.world),
                **_moving_average(state),
            }
            dcp.save(tensors, storage_writer=writer, no_dist=_no_dist())
        if self.world.is_main:
            progress = {
                "step": state.step,
                "tokens": int(state.tokens),
                "train_seconds": state.train_seconds,
                "interval": state.interval.state_dict(),
                **({} if state.loss_scale is None else {"loss_scale": state.loss_scale.state_dict()}),
                "world_size": self.world.size,
                "data": dict(position),
            }
            write_json(work / "state.json", progress)
            add_files(work)

    def _checksums(self, work: Path) -> dict[str, dict[str, Any]]:
        """Size and sha256 of the files that this rank wrote; on rank 0 also of the files that all ranks share."""
        own = f"__{self.world.rank}_"
        names = [path.name for path in work.iterdir()]
        mine = [name for name in names if name.startswith(own) or (self.world.is_main and not name.startswith("__"))]
        return {name: _size_and_sha256(work / name) for name in mine}

    def _commit(self, work: Path, final: Path, files: dict[str, dict[str, Any]]) -> str | None:
        """Makes `work` the checkpoint `final`; returns the error in words, or None."""
        try:
            for name in files:
                sync(work / name)
            write_json(work / MANIFEST, {"format": 1, "files": dict(sorted(files.items()))})
            if final.exists():  # the run has resumed from an older checkpoint and is at this step again
                os.rename(final, final.with_name(f"{_UNFINISHED}replaced-{final.name}"))
            os.rename(work, final)
            sync(self.directory)
        except OSError as error:
            return _describe_error(error)
        return None

    def _prune(self) -> None:
        """Deletes checkpoints that neither keep_last nor keep_every keeps, and unfinished ones of killed processes."""
        steps = {step_of(path): path for path in list_checkpoints(self.directory)}
        try:
            for step in sorted(steps)[: -self.keep_last]:
                if self.keep_every is None or step % self.keep_every:
                    # Renamed first: a kill while deleting must not leave half a checkpoint under a good name.
                    os.rename(steps[step], steps[step].with_name(f"{_UNFINISHED}deleting-{steps[step].name}"))
            for leftover in self.directory.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(leftover)
        except OSError as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", self.directory, error)


_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match
    return int(match[1])


def find_checkpoint(key: str, value: str | None) -> Path:
    """The checkpoint that the user's `key=value` names: value is a checkpoint, or a run directory with checkpoints, of
    which the newest is taken.

    Raises DataError if there is none.
    """
    if not value:
        raise DataError(f"{key} is not set: name a run directory or a checkpoint, for example {key}=runs/quickstart")
    path = Path(value).expanduser()
    if (path / MANIFEST).is_file():
        return path
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints:
        what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        raise DataError(f"{key}={value}: {what}. Name a run directory or one of its checkpoints/step_* directories.")
    return checkpoints[-1]


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
            elif _size_and_sha256(path) != expected:
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
    model, optimizer = get_state_dict(state.model, state.optimizer, options=_OPTIONS)
    check_names(checkpoint, model)
    tensors: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "statistics": _statistics_to_load(checkpoint, state.model),
        **_moving_average(state),
    }
    if state.ema is not None:
        check_names(checkpoint, state.ema.weights, "ema")
    with _without_process_group_warning():
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=_no_dist())
    _set_statistics(state.model, tensors["statistics"], state.world)
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=_OPTIONS)
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
        "statistics": _statistics_to_load(checkpoint, model),
    }
    check_names(checkpoint, tensors[part], part)
    with _without_process_group_warning():
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=_no_dist())
    _set_statistics(model, tensors["statistics"], world)
    set_model_state_dict(model, tensors[part])


def _moving_average(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """The state's moving average under its name in a checkpoint, if there is one."""
    return {} if state.ema is None else {"ema": state.ema.weights}


def _statistics_of_all_ranks(model: Decoder, world: World) -> dict[str, Tensor]:
    """Each running statistic of all ranks, `(ranks, ...)`, on every rank. The statistics of ranks may differ, and on a
    resume each rank gets its own back."""
    own = {name: value.cpu() for name, value in model.statistics().items()}
    ranks = world.gather(own) if own else []
    return {name: torch.stack([rank[name] for rank in ranks]) for name in own}


def _statistics_to_load(checkpoint: Path, model: Decoder) -> dict[str, Tensor]:
    """Uninitialised tensors, in the shapes that `_statistics_of_all_ranks` returned when the checkpoint was saved."""
    if not model.statistics():
        return {}
    n_ranks = read_json(checkpoint / "state.json")["world_size"]
    return {name: value.new_empty(n_ranks, *value.shape, device="cpu") for name, value in model.statistics().items()}


def _set_statistics(model: Decoder, ranks: dict[str, Tensor], world: World) -> None:
    """Sets this rank's statistics: its own if the number of ranks is that of the checkpoint, else the mean of all."""
    for name, value in model.statistics().items():
        same = len(ranks[name]) == world.size
        value.copy_(ranks[name][world.rank] if same else ranks[name].mean(0))


def _no_dist() -> bool:
    return not dist.is_initialized()


def _describe_error(error: BaseException) -> str:
    """The error in one line; of a CheckpointException the error of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Hides torch's warning that a single process saves without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _size_and_sha256(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
