"""Saves training states: each checkpoint is complete or absent."""

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import sync, write_json
from ngpt_train.distributed import World
from ngpt_train.training.checkpoint.files import (
    FORMAT,
    MANIFEST,
    STATE,
    UNFINISHED,
    VALIDATION,
    best,
    has_tensors,
    last_good,
    list_checkpoints,
    losses_of_good,
    read_validation_losses,
    size_and_sha256,
    step_of,
)
from ngpt_train.training.checkpoint.names import by_canonical_name
from ngpt_train.training.checkpoint.soundness import first_not_finite, has_exploded
from ngpt_train.training.checkpoint.tensors import (
    OPTIONS,
    describe_error,
    moving_average,
    no_dist,
    statistics_of_all_ranks,
    without_process_group_warning,
)
from ngpt_train.training.guards import NumericalError
from ngpt_train.training.state import TrainState

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, in `directory`."""

    def __init__(
        self, directory: Path, world: World, keep_last: int, keep_every: int | None, keep_best: int = 0
    ) -> None:
        self.directory = directory
        self.world = world
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.go_back_every = 1  # a run goes back to the last good checkpoint at a multiple of this step

    def save(
        self,
        state: TrainState,
        position: Mapping[str, Any],
        add_files: Callable[[Path], None],
        loss: float | None = None,
    ) -> Path:
        """Saves `state` and the position in the data; a collective call.

        `add_files` writes further files into the directory of the checkpoint. loss: of the last step, the same on every
        rank; the manifest says whether it had exploded. Raises, on every rank, NumericalError if the state holds NaN or
        an infinity, and DataError if the checkpoint could not be written; earlier checkpoints are then untouched.
        """
        final = self.directory / f"step_{state.step:08d}"
        work = self.directory / f"{UNFINISHED}{final.name}"
        problem: str | None = None
        sums: dict[str, dict[str, Any]] = {}
        own = self._collect(state)
        try:
            self._write(work, own, state, position, add_files)
            sums = self._checksums(work)
        except (Exception, CheckpointException) as error:  # CheckpointException is not a subclass of Exception
            problem = describe_error(error)
        outcomes = self.world.gather((problem, sums))
        problem = next((found for found, _ in outcomes if found), None)
        if problem is None:
            files = {name: entry for _, part in outcomes for name, entry in part.items()}
            problem = self.world.on_main(lambda: self._commit(work, final, files, loss))
        if problem is not None:
            self.world.on_main(lambda: shutil.rmtree(work, ignore_errors=True))
            raise DataError(f"The checkpoint {final} could not be written: {problem}.")
        self.world.on_main(self._prune)
        return final

    def validated(self, step: int, loss: float) -> None:
        """Notes the validation loss of the weights after `step`, by which the best checkpoints are kept. Rank 0 calls
        it."""
        if not self.directory.is_dir() or not math.isfinite(loss):
            return
        try:
            kept = {step_of(path) for path in list_checkpoints(self.directory)}
            losses = read_validation_losses(self.directory) | {step: loss}
            stored = {str(n): losses[n] for n in sorted(losses) if n in kept or n == step}
            write_json(self.directory / VALIDATION, stored)
        except (OSError, DataError) as error:
            logger.warning("%s could not be written: %s", self.directory / VALIDATION, error)

    def advice(self, lr: float) -> str:
        """What to do after a run with the learning rate `lr` has become numerically meaningless."""
        good = last_good(self.directory)
        begin = f"run.init_from={good} run.name=... (its last good checkpoint)" if good else "run.name=..."
        none = "" if good else ", because this one has no good checkpoint"
        return f"Start a new run, {begin}, with a lower optim.lr (it is {lr:g}){none}"

    def _collect(self, state: TrainState) -> dict[str, Any]:
        """The tensors of a checkpoint, as far as this rank has them. A rank that fails here would leave the others in
        the collectives of `_write`, so all hear of it first."""
        problem = unsound = None
        tensors: dict[str, Any] = {}
        try:
            unsound = first_not_finite(state)
            model, optimizer = get_state_dict(state.model, state.optimizer, options=OPTIONS)
            tensors = {"model": model, "optimizer": optimizer, **moving_average(state)}
        except Exception as error:
            problem = describe_error(error)
        for rank, (failed, not_finite) in enumerate(self.world.gather((problem, unsound))):
            where = f" (rank {rank})" if self.world.size > 1 else ""
            if failed:
                raise DataError(f"The checkpoint of step {state.step} could not be written: {failed}{where}.")
            if not_finite:
                raise NumericalError(
                    f"step {state.step}: {not_finite} is not finite{where}, and no checkpoint is written. "
                    f"{self.advice(float(state.config.optim.lr))}."
                )
        return tensors

    def _write(
        self,
        work: Path,
        own: dict[str, Any],
        state: TrainState,
        position: Mapping[str, Any],
        add_files: Callable[[Path], None],
    ) -> None:
        self.world.on_main(lambda: _make_empty(work))
        writer = HuggingFaceStorageWriter(str(work), save_distributed=True)  # which fsyncs every file
        with without_process_group_warning():
            # Without the optimizer's numbers, such as the groups' learning rates, which the config has.
            tensors = own | {"statistics": statistics_of_all_ranks(state.model, self.world)}
            dcp.save(by_canonical_name(state.model, tensors), storage_writer=writer, no_dist=no_dist())
        if self.world.is_main:
            progress = {
                "step": state.step,
                "tokens": int(state.tokens),
                "train_seconds": state.train_seconds,
                "interval": state.interval.state_dict(),
                "guards": state.guards.state_dict(),
                "rollbacks": state.rollbacks,
                **({} if state.loss_scale is None else {"loss_scale": state.loss_scale.state_dict()}),
                "world_size": self.world.size,
                "data": dict(position),
            }
            write_json(work / STATE, progress)
            add_files(work)

    def _checksums(self, work: Path) -> dict[str, dict[str, Any]]:
        """Size and sha256 of the files that this rank wrote; on rank 0 also of the files that all ranks share."""
        own = f"shard-{self.world.rank + 1:05d}-"
        names = [path.name for path in work.iterdir()]
        mine = [name for name in names if name.startswith(own) or (self.world.is_main and not has_tensors(name))]
        return {name: size_and_sha256(work / name) for name in mine}

    def _commit(self, work: Path, final: Path, files: dict[str, dict[str, Any]], loss: float | None) -> str | None:
        """Makes `work` the checkpoint `final`; returns the error in words, or None."""
        try:
            good = not has_exploded(loss, losses_of_good(self.directory))
            finite_loss = loss if loss is not None and math.isfinite(loss) else None
            for name in files:
                sync(work / name)
            manifest = {"format": FORMAT, "good": good, "loss": finite_loss, "files": dict(sorted(files.items()))}
            write_json(work / MANIFEST, manifest)
            if final.exists():  # the run has resumed from an older checkpoint and is at this step again
                os.rename(final, final.with_name(f"{UNFINISHED}replaced-{final.name}"))
            os.rename(work, final)
            sync(self.directory)
        except OSError as error:
            return describe_error(error)
        return None

    def _prune(self) -> None:
        """Deletes checkpoints that none of keep_last, keep_every and keep_best keeps, but for the last good one, and
        unfinished ones of killed processes."""
        steps = {step_of(path): path for path in list_checkpoints(self.directory)}
        try:
            kept = {last_good(self.directory), last_good(self.directory, self.go_back_every)}
            kept |= {*best(self.directory, self.keep_best)}
            for step in sorted(steps)[: -self.keep_last]:
                if steps[step] not in kept and (self.keep_every is None or step % self.keep_every):
                    # Renamed first: a kill while deleting must not leave half a checkpoint under a good name.
                    os.rename(steps[step], steps[step].with_name(f"{UNFINISHED}deleting-{steps[step].name}"))
            for leftover in self.directory.glob(f"{UNFINISHED}*"):
                shutil.rmtree(leftover)
        except (OSError, DataError) as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", self.directory, error)


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
