"""Validations of a run or a checkpoint: the choice of rows and contexts, and files with the losses of rows."""

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
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import chosen_rows, rows_of, same_text
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.validation import RowLosses, Validation
from ngpt_train.models.decoder import Decoder

# A file of RowFiles, complete or left by a kill.
ROW_FILE = re.compile(r"\.?step_(?P<step>\d{8,})(_context_\d+)?\.npz(?P<partial>\.partial)?")
FORWARD = 1 / 3  # of the compute of a training step: the backward pass costs twice the forward pass


class Evaluations:
    """Validates a model on rows of a split: at model.context, and at each of eval.contexts.

    n_bytes: see `Validation`. Raises DataError if the split is shorter than a row of a context.
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
        """The validation of all chosen rows at model.context."""
        return self._all[self.context]

    def row_losses(self, model: Decoder, world: World, last: bool = True) -> dict[int, RowLosses]:
        """The losses of each row, by context; the same on every rank. A collective call.

        last: takes all rows; otherwise as many as eval.budget allows, the same ones in each call.
        """
        chosen = self._all if last else self._early
        return {context: validation.row_losses(model, world) for context, validation in chosen.items()}

    def metrics(self, losses: Mapping[int, RowLosses]) -> dict[str, Any]:
        """The metrics of all contexts, as NAME_ctxCONTEXT if it is not model.context."""
        found = losses[self.context].metrics()
        for context in sorted(losses.keys() - {self.context}):
            found |= {f"{name}_ctx{context}": value for name, value in losses[context].metrics().items()}
        return found

    def notes(self) -> list[str]:
        """Sentences about the rows, for the log."""
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
    """The rows of a validation before the last, at each of `n_contexts` contexts; at least one.

    Their forward pass costs the share eval.budget of the training steps between two validations.
    """
    if config.eval.budget is None:
        return sys.maxsize
    steps = config.eval.every or config.train.steps
    between = steps * config.train.rows_per_step
    return max(1, int(config.eval.budget * between / FORWARD / n_contexts))


def at_contexts(
    tokens: Tokens, n_bytes: NDArray[np.int64], config: Config, chosen: NDArray[np.int64], contexts: list[int]
) -> dict[int, Validation]:
    """A validation for each context: of the `chosen` rows at model.context, of rows of the same text at the others."""
    found, trained = {}, config.model.context
    for context in contexts:
        if context != trained and len(tokens) <= context:
            raise DataError(
                f"eval.contexts: the {tokens.split} split of {tokens.path} has {len(tokens):,} tokens, less than one "
                f"row of {context} + 1; leave {context} out, or hold out more text (data.val_fraction). For a mixture "
                "or streamed text raise eval.rows or eval.tokens: no more text than that is read"
            )
        rows = rows_of(tokens, replace(config, model=replace(config.model, context=context)))
        here = chosen if context == trained else same_text(chosen, trained, context, len(rows))
        found[context] = Validation(rows, n_bytes, here)
    return found


class RowFiles:
    """`<run>/evals/step_00001000.npz`: the row losses of each eval record of metrics.jsonl.

    Other contexts than model.context have their own files, step_00001000_context_2048.npz. Files of steps without a
    record are deleted. Rank 0 alone makes this object, after a resume has trimmed metrics.jsonl.
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
        """Writes the files of a step, unless it has a record: a resumed run may repeat a validation.

        Raises DataError if they cannot be written.
        """
        if step in self._recorded:
            return
        try:
            self.directory.mkdir(exist_ok=True)
            for context, rows in losses.items():
                rows.write(self.directory / file_name(f"step_{step:08d}", context, self.context))
        except OSError as error:
            problem = f"the losses of the rows at step {step} cannot be written ({error.strerror}); make room"
            raise DataError(f"{self.directory}: {problem}") from error
        self._recorded.add(step)


def file_name(stem: str, context: int, training_context: int) -> str:
    """STEM.npz for model.context, STEM_context_CONTEXT.npz for another one."""
    return f"{stem}.npz" if context == training_context else f"{stem}_context_{context}.npz"
