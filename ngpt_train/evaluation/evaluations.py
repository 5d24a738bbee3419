"""The validations of a run or of a checkpoint: on which rows, at which contexts, and the files of their losses."""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines
from ngpt_train.data.rows import rows_of
from ngpt_train.data.token_sequence import Tokens
from ngpt_train.data.validation_rows import chosen_rows, same_text
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.validation import RowLosses, Validation
from ngpt_train.models.decoder import Decoder

# A file of RowFiles, or what a kill has left of one.
ROW_FILE = re.compile(r"\.?step_(?P<step>\d{8,})(_context_\d+)?\.npz(?P<partial>\.partial)?")
FORWARD = 1 / 3  # of the compute of a training step: its backward pass costs twice its forward pass


class Evaluations:
    """Validates a model on rows of a split: at model.context, and at each of eval.contexts.

    n_bytes: as of `Validation`. Raises DataError where the split is shorter than a row of one of the contexts.
    """

    def __init__(self, tokens: Tokens, n_bytes: NDArray[np.int64], config: Config) -> None:
        self.config = config
        self.context = config.model.context
        chosen = chosen_rows(rows_of(tokens, config), config)
        contexts = sorted({*(config.eval.contexts or []), self.context})
        within = rows_within_budget(config, len(contexts))
        self._all = at_contexts(tokens, n_bytes, config, chosen, contexts)
        fewer = within < len(chosen)
        self._early = at_contexts(tokens, n_bytes, config, chosen[:within], contexts) if fewer else self._all

    @property
    def at_training_context(self) -> Validation:
        """The validation of all rows at model.context."""
        return self._all[self.context]

    def row_losses(self, model: Decoder, world: World, last: bool = True) -> dict[int, RowLosses]:
        """The losses of each row by context; the same on every rank. A collective call.

        last: on all rows; otherwise on as many as eval.budget allows, the same in each call.
        """
        chosen = self._all if last else self._early
        return {context: validation.row_losses(model, world) for context, validation in chosen.items()}

    def metrics(self, losses: Mapping[int, RowLosses]) -> dict[str, Any]:
        """The metrics of all contexts, those of another context than the training one as NAME_ctxCONTEXT."""
        found = losses[self.context].metrics()
        for context in sorted(losses.keys() - {self.context}):
            found |= {f"{name}_ctx{context}": value for name, value in losses[context].metrics().items()}
        return found

    def notes(self) -> list[str]:
        """Sentences for the log about the rows."""
        whole, early = self._all[self.context], self._early[self.context]
        n_targets, wanted = len(whole.targets), self.config.eval.tokens
        found = [f"validation on {whole.n_rows:,} rows with {n_targets:,} targets, rows_hash {whole.rows_hash}"]
        if wanted is not None and n_targets < wanted:
            found[0] += f": all that is held out, fewer than eval.tokens={wanted:,}"
        if early is not whole:
            found.append(
                f"validations before the last take {early.n_rows:,} of these rows (eval.budget="
                f"{self.config.eval.budget:g}), rows_hash {early.rows_hash}"
            )
        return found


def rows_within_budget(config: Config, n_contexts: int) -> int:
    """Rows of model.context tokens that a validation before the last may have, at each of `n_contexts` contexts.

    A forward pass over them costs eval.budget of the training steps between two validations; at least one row.
    """
    if config.eval.budget is None:
        return sys.maxsize
    steps = config.eval.every or config.train.steps
    between = steps * config.train.rows_per_step
    return max(1, int(config.eval.budget * between / FORWARD / n_contexts))


def at_contexts(
    tokens: Tokens, n_bytes: NDArray[np.int64], config: Config, chosen: NDArray[np.int64], contexts: list[int]
) -> dict[int, Validation]:
    """The `chosen` rows of model.context tokens, and at the other contexts rows of the same text."""
    found, trained = {}, config.model.context
    for context in contexts:
        if context != trained and len(tokens) <= context:
            raise DataError(
                f"eval.contexts: the {tokens.split} split of {tokens.path} has {len(tokens):,} tokens, less than one "
                f"row of {context} + 1; leave {context} out, or hold out more text (data.val_fraction). Of a mixture "
                "and of streamed text as much is read as eval.rows or eval.tokens asks for: raise that"
            )
        rows = rows_of(tokens, replace(config, model=replace(config.model, context=context)))
        here = chosen if context == trained else same_text(chosen, trained, context, len(rows))
        found[context] = Validation(rows, n_bytes, here)
    return found


class RowFiles:
    """`<run>/evals/step_00001000.npz`: the row losses of each eval record of metrics.jsonl, and of no other step.

    Other contexts than the training one have files of their own, step_00001000_context_2048.npz. Rank 0 alone makes
    this object, once metrics.jsonl holds the records that the run goes on from; such files of other steps are deleted,
    and no file with another name.
    """

    def __init__(self, directory: Path, metrics: Path, context: int) -> None:
        self.directory, self.context = directory, context
        records = [record for _, record in json_lines(metrics) if record is not None]
        self._recorded = {record["step"] for record in records if record["kind"] == "eval"}
        for path in directory.iterdir() if directory.is_dir() else []:
            found = ROW_FILE.fullmatch(path.name)
            if found and (found["partial"] or int(found["step"]) not in self._recorded):
                path.unlink()

    def write(self, step: int, losses: Mapping[int, RowLosses]) -> None:
        """Writes the files of a step, unless its record is written: a resumed run may repeat a validation.

        Raises DataError if they cannot be written.
        """
        if step in self._recorded:
            return
        try:
            self.directory.mkdir(exist_ok=True)
            for context, rows in losses.items():
                rows.write(self.directory / file_name(_name(step), context, self.context))
        except OSError as error:
            problem = f"the losses of the rows at step {step} cannot be written ({error.strerror}); make room"
            raise DataError(f"{self.directory}: {problem}") from error
        self._recorded.add(step)


def file_name(stem: str, context: int, training_context: int) -> str:
    """STEM.npz for the training context, STEM_context_CONTEXT.npz for another."""
    return f"{stem}.npz" if context == training_context else f"{stem}_context_{context}.npz"


def _name(step: int) -> str:
    return f"step_{step:08d}"
