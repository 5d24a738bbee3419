"""Saves training states: each checkpoint is complete or absent.

A save has two parts. `snapshot`, on the main thread, checks the state and shares it out among the ranks. `write` writes
it to disk; `hooks/saving.py` lets a thread do that beside training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.core.errors import DataError, in_one_line
from ngpt_train.core.files import remove, sync, write_json
from ngpt_train.training.checkpoint import state_tensors
from ngpt_train.training.checkpoint.catalogue import (
    FORMAT,
    MANIFEST,
    STATE,
    UNFINISHED,
    VALIDATION,
    XXH3,
    best,
    differences,
    has_exploded,
    has_tensors,
    last_good,
    list_checkpoints,
    losses_of_good,
    read_validation_losses,
    size_and_checksum,
    step_of,
)
from ngpt_train.training.checkpoint.tensor_files import Piece, Place, pieces_of, write_tensors
from ngpt_train.training.guards import NumericalError

if TYPE_CHECKING:
    from ngpt_train.distributed.world import World
    from ngpt_train.training.state import TrainState

logger = logging.getLogger(__name__)


SPARE = 2**20  # bytes on the disk for the small files of a checkpoint
OfPath = Callable[[Path], None]  # is called with a checkpoint


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint, before it is written."""

    step: int
    pieces: tuple[Piece, ...]
    bytes: int  # of all ranks' tensors
    progress: Mapping[str, Any]  # the content of state.json
    add_files: OfPath  # writes more files into the directory, on rank 0
    loss: float | None  # of the last step; the manifest notes whether it had exploded
    problem: str | None = None  # why this rank cannot write; None if it can


@dataclass
class Checkpoints:
    """The checkpoints of one run, in `directory`."""

    directory: Path
    world: World
    keep_last: int
    keep_every: int | None
    checksum: str = XXH3  # a value of checkpoint.checksum
    keep_best: int = 0
    go_back_every: int = 1  # a run goes back to the last good checkpoint at a multiple of this step
    # The pieces of this rank with their bytes, the pieces that it writes, and the bytes of all ranks: the same at every
    # save.
    _shares: tuple[dict[Place, int], set[Place], int] | None = field(default=None, init=False)

    def snapshot(
        self, state: TrainState, position: Mapping[str, Any], add_files: OfPath, loss: float | None
    ) -> Snapshot:
        """The first part of a save: `state` and the position in the data. The pieces are views of the state, not
        copies. A collective call; loss is the same on every rank. Raises, on every rank, NumericalError if the state
        holds NaN or an infinity, and DataError if a rank cannot collect its part."""
        pieces, n_bytes = self._collect(state)
        progress = {**state.counters(), "world_size": self.world.size, "data": dict(position)}
        return Snapshot(state.step, pieces, n_bytes, progress, add_files, loss)

    def write(self, snapshot: Snapshot, world: World, complete: OfPath = lambda _: None) -> Path:
        """The second part of a save: writes, checks, renames, and deletes old checkpoints. A collective call of
        `world`, all ranks in a group of their own. complete: called before others are deleted. Raises DataError on
        every rank, with earlier checkpoints untouched, if the checkpoint could not be written."""
        final = self.directory / f"step_{snapshot.step:08d}"
        work = self.directory / f"{UNFINISHED}{final.name}"
        problem = world.on_main(lambda: self._make_room(work, snapshot.bytes))
        if problem is None:
            own = snapshot.problem
            entries: dict[str, dict[str, Any]] = {}
            try:
                if own is None:
                    entries = self._write_files(work, snapshot)
                    own = next((f"a file reads back differently: {x}" for x in differences(work, entries)), None)
            except Exception as error:
                own = in_one_line(error)
            outcomes = world.gather((own, entries))
            problem = next((found for found, _ in outcomes if found), None)
        if problem is None:
            files = {name: entry for _, part in outcomes for name, entry in part.items()}
            problem = world.on_main(lambda: self._commit(work, final, files, snapshot.loss))
        if problem is not None:
            world.on_main(lambda: _remove_if_possible(work))
            raise DataError(f"The checkpoint {final} could not be written: {problem}.")
        complete(final)
        world.on_main(self._prune)
        return final

    def validated(self, step: int, loss: float) -> None:
        """Notes the validation loss after `step`, which decides the best checkpoints. Rank 0 calls it."""
        if not self.directory.is_dir() or not math.isfinite(loss):
            return
        try:
            kept = {step_of(path) for path in list_checkpoints(self.directory)}
            losses = read_validation_losses(self.directory) | {step: loss}
            # Also the loss of a checkpoint that is still being written.
            stored = {str(n): losses[n] for n in sorted(losses) if n in kept or n > max(kept, default=0)}
            write_json(self.directory / VALIDATION, stored)
        except (OSError, DataError) as error:
            logger.warning("%s could not be written: %s", self.directory / VALIDATION, error)

    def advice(self, lr: float) -> str:
        """A sentence for the user of a run with the learning rate `lr` after a NumericalError."""
        good = last_good(self.directory)
        begin = f"run.init_from={good} run.name=... (its last good checkpoint)" if good else "run.name=..."
        none = "" if good else ", because this one has no good checkpoint"
        return f"Start a new run, {begin}, with a lower optim.lr (it is {lr:g}){none}"

    def _collect(self, state: TrainState) -> tuple[tuple[Piece, ...], int]:
        """The pieces for this rank to write, and the bytes of all ranks. The ranks first tell each other of a failure,
        which would otherwise leave them in a collective."""
        problem = unsound = None
        held: dict[Place, Piece] = {}
        try:
            unsound = state_tensors.first_not_finite(state)
            named = state_tensors.by_canonical_name(state.model, state_tensors.held_tensors(state))
            held = {piece.place: piece for name, tensor in named.items() for piece in pieces_of(name, tensor)}
        except Exception as error:
            problem = in_one_line(error)
        sizes = {place: piece.rows.nbytes for place, piece in held.items()}
        known = self._shares is not None and self._shares[0] == sizes  # the same on every rank
        ranks = self.world.gather((problem, unsound, None if known else sizes))
        for rank, (failed, not_finite, _) in enumerate(ranks):
            where = f" (rank {rank})" if self.world.size > 1 else ""
            if failed:
                raise DataError(f"The checkpoint of step {state.step} could not be written: {failed}{where}.")
            if not_finite:
                raise NumericalError(
                    f"step {state.step}: {not_finite} is not finite{where}, and no checkpoint is written. "
                    f"{self.advice(float(state.config.optim.lr))}."
                )
        if self._shares is None or not known:
            sizes_of_ranks = [of_rank or {} for *_, of_rank in ranks]
            shares = share(sizes_of_ranks)
            written = [of_rank[place] for of_rank, mine in zip(sizes_of_ranks, shares, strict=True) for place in mine]
            self._shares = sizes, shares[self.world.rank], sum(written)
        _, mine, of_all = self._shares
        # Every rank has the statistics of all ranks; the main rank writes them.
        of_all_ranks = {"statistics": state_tensors.statistics_of_all_ranks(state.model, self.world)}
        statistics = state_tensors.by_canonical_name(state.model, of_all_ranks)
        own = [piece for place, piece in held.items() if place in mine]
        if self.world.is_main:
            own += [piece for name, tensor in statistics.items() for piece in pieces_of(name, tensor)]
        return tuple(own), of_all + sum(tensor.nbytes for tensor in statistics.values())

    def _make_room(self, work: Path, n_bytes: int) -> str | None:
        """Makes `work` an empty directory; returns the problem as a phrase, or None. First deletes the leftovers of
        killed processes, which may fill the disk."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(f"{UNFINISHED}*"):
                _remove_if_possible(leftover)
            work.mkdir()
            free = shutil.disk_usage(work).free
        except OSError as error:
            return in_one_line(error)
        if free >= n_bytes + SPARE:
            return None
        missing = n_bytes + SPARE - free
        return f"it takes {gb(n_bytes)}, and {gb(free)} are free on its disk: {gb(missing)} are missing"

    def _write_files(self, work: Path, snapshot: Snapshot) -> dict[str, dict[str, Any]]:
        """Writes this rank's files and returns their entries in the manifest."""
        entries: dict[str, dict[str, Any]] = {}
        if snapshot.pieces:
            name = f"shard-{self.world.rank + 1:05d}-model-00001-of-00001.safetensors"
            entries[name] = write_tensors(work / name, snapshot.pieces, self.checksum)
        if self.world.is_main:
            (work / STATE).write_text(json.dumps(snapshot.progress, indent=2) + "\n")
            snapshot.add_files(work)
            for path in work.iterdir():
                if not has_tensors(path.name):
                    sync(path)
                    entries[path.name] = size_and_checksum(path, self.checksum)
        return entries

    def _commit(self, work: Path, final: Path, files: dict[str, dict[str, Any]], loss: float | None) -> str | None:
        """Makes `work` the checkpoint `final`; returns the error as a phrase, or None."""
        try:
            good = not has_exploded(loss, losses_of_good(self.directory))
            finite_loss = loss if loss is not None and math.isfinite(loss) else None
            manifest = {"format": FORMAT, "good": good, "loss": finite_loss, "files": dict(sorted(files.items()))}
            write_json(work / MANIFEST, manifest)
            if final.exists():  # the run has resumed from an older checkpoint and is at this step again
                os.rename(final, final.with_name(f"{UNFINISHED}replaced-{final.name}"))
            os.rename(work, final)
            sync(self.directory)
        except OSError as error:
            return in_one_line(error)
        return None

    def _prune(self) -> None:
        """Deletes old checkpoints, except those of keep_last, keep_every, keep_best and the last good one. Also deletes
        unfinished checkpoints of killed processes."""
        steps = {step_of(path): path for path in list_checkpoints(self.directory)}
        try:
            kept = {last_good(self.directory), last_good(self.directory, self.go_back_every)}
            kept |= {*best(self.directory, self.keep_best)}
            for step in sorted(steps)[: -self.keep_last]:
                if steps[step] not in kept and (self.keep_every is None or step % self.keep_every):
                    delete(steps[step])
            for leftover in self.directory.glob(f"{UNFINISHED}*"):
                remove(leftover)
        except (OSError, DataError) as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", self.directory, error)


def delete(checkpoint: Path) -> None:
    """Renames it first: a kill meanwhile leaves an unfinished checkpoint, which the next save deletes."""
    doomed = checkpoint.with_name(f"{UNFINISHED}deleting-{checkpoint.name}")
    os.rename(checkpoint, doomed)
    remove(doomed)


def _remove_if_possible(path: Path) -> None:
    with contextlib.suppress(OSError):
        remove(path)


def share(held: Sequence[Mapping[Place, int]]) -> list[set[Place]]:
    """{places} for each rank to write: each place once, and about as many bytes on every rank. held[rank][place]:
    bytes. Every rank computes the same."""
    holders: dict[Place, list[int]] = {}
    for rank, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(rank)
    size = {place: held[ranks[0]][place] for place, ranks in holders.items()}
    load = [0] * len(held)
    shares: list[set[Place]] = [set() for _ in held]
    # Places with one holder first, then the large ones.
    for place in sorted(holders, key=lambda place: (len(holders[place]) > 1, -size[place], place)):
        writer = min(holders[place], key=lambda rank: (load[rank], rank))
        load[writer] += size[place]
        shares[writer].add(place)
    return shares


def gb(n_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.2f} MB"
