"""Loss, perplexity and bits per byte on fixed rows: of a run or a checkpoint, at one or several contexts."""

import hashlib
import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, write_atomically
from ngpt_train.core.recorded import ANSWERS
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import LabelRows, Rows, chosen_rows, held_out_rows, rows_of, same_text
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.layouts import averaged_statistics
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.answers import Answers
from ngpt_train.models.decoder import Decoder, Loss, uncompiled

# Most tokens in one forward pass. Rows that share a matrix product change each other's rounding, so this is a constant;
# train.micro_rows may depend on the number of ranks.
CHUNK_TOKENS = 8_192
# A file of RowFiles, complete or left by a kill.
ROW_FILE = re.compile(r"\.?step_(?P<step>\d{8,})(_context_\d+)?(_answers\.jsonl|\.npz)(?P<partial>\.partial)?")
FORWARD = 1 / 3  # of the compute of a training step: the backward pass costs twice the forward pass


@dataclass(frozen=True)
class RowLosses:
    """The loss of each row of a validation set, for means and for pairing two runs row by row.

    loss_sum: (N,) the summed cross-entropy of the row's targets, in nats. n_targets: (N,) their number. n_bytes: the
    text of all targets. rows_hash: identifies the rows. n_hits: targets that have the largest logit, of masked rows.
    """

    loss_sum: NDArray[np.float64]
    n_targets: NDArray[np.int64]
    n_bytes: int
    rows_hash: str
    n_hits: int | None = None
    answers: Answers | None = None  # of examples with a label

    def metrics(self) -> dict[str, Any]:
        """loss (nats per target), ppl, bits_per_byte and, of masked rows, accuracy; rows, n_targets and rows_hash
        identify the rows."""
        total, n_targets = float(self.loss_sum.sum()), int(self.n_targets.sum())
        loss = total / n_targets
        return {
            "loss": loss,
            "ppl": math.exp(min(loss, 700.0)),
            # A text without bytes (special ids alone) has no bits per byte.
            "bits_per_byte": total / math.log(2) / self.n_bytes if self.n_bytes else math.nan,
            **({} if self.n_hits is None else {"accuracy": self.n_hits / n_targets}),
            **({} if self.answers is None else self.answers.metrics()),
            "rows": len(self.loss_sum),
            "n_targets": n_targets,
            "rows_hash": self.rows_hash,
        }

    def write(self, path: Path) -> None:
        """Writes loss_sum, n_targets and rows_hash as an .npz file, atomically, and of labelled examples a file of
        answers beside it; equal losses give equal bytes."""
        file = io.BytesIO()
        np.savez(file, loss_sum=self.loss_sum, n_targets=self.n_targets, rows_hash=np.array(self.rows_hash))
        if self.answers is not None:
            write_atomically(path.with_name(f"{path.stem}{ANSWERS}"), self.answers.lines())
        write_atomically(path, file.getvalue())


class Validation:
    """Evaluates a model on fixed rows. Each rank computes some chunks of them.

    chosen: (N,) indices of the rows; they are evaluated in ascending order. n_bytes: `(vocab_size,)`, the bytes of text
    of each id, from the tokenizer.
    """

    def __init__(self, rows: Rows, n_bytes: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        self.numbers = np.sort(chosen)  # (N,)
        batch = rows.batch(self.numbers)  # tokens, targets, ...: (N, context)
        tokens, targets, *_ = batch
        self.batch = [torch.from_numpy(part) for part in batch]
        self.targets = targets[targets != IGNORED]
        self.n_rows, context = targets.shape
        self.n_bytes = 0 if isinstance(rows, LabelRows) else int(n_bytes[self.targets].sum())
        self.rows_hash = hash_of(tokens, targets)
        self.chunk = min(self.n_rows, max(1, CHUNK_TOKENS // context))

    @property
    def _n_chunks(self) -> int:
        return -(-self.n_rows // self.chunk)

    @torch.no_grad()
    def row_losses(self, model: Decoder, world: World) -> RowLosses:
        """The loss of each row, in the order of the rows; the same on every rank. A collective call."""
        sums = torch.zeros(3, self._n_chunks, self.chunk, dtype=torch.float64, device=world.device)
        for index, loss in self._losses(model, world):
            assert loss.by_token is not None
            sums[0, index] = loss.by_token.double().sum(1)
            if loss.n_hits is not None and loss.answers is not None:
                sums[1, index] = loss.n_hits.double()
                sums[2, index] = loss.answers[:, 0].double()  # of several, no answer of the row
        # One rank has a row's loss and the others have 0, so the sum over ranks is exact.
        found, hits, answers = world.sum_(sums).flatten(1)[:, : self.n_rows].cpu().numpy()
        n_targets = (self.batch[1] != IGNORED).sum(1).numpy()
        config = model.config
        n_hits = int(hits.sum()) if config.objective == "masked" else None
        answered = Answers(self.targets, answers, config.n_classes) if config.n_classes else None
        return RowLosses(found, n_targets, self.n_bytes, self.rows_hash, n_hits, answered)

    @torch.no_grad()
    def token_losses(self, model: Decoder, world: World) -> NDArray[np.float64]:
        """The losses `(N, context)` of all targets; 0 for ignored ones. For one process."""
        assert world.size == 1
        found = np.zeros((self._n_chunks * self.chunk, self.batch[1].shape[1]))
        for index, loss in self._losses(model, world):
            assert loss.by_token is not None
            n_targets = loss.by_token.shape[1]  # an encoder-decoder has no losses for the source
            found[index * self.chunk : (index + 1) * self.chunk, -n_targets:] = loss.by_token.double().cpu().numpy()
        return found[: self.n_rows]

    def _losses(self, model: Decoder, world: World) -> Iterator[tuple[int, Loss]]:
        """The number of each of this rank's chunks, and its losses, by_token `(chunk, targets)`."""
        with not_training(model, world):
            for index, counts in shares(self._n_chunks, world):
                loss = model(*self._chunk(index, world.device))
                if counts:
                    yield index, loss

    def _chunk(self, index: int, device: torch.device) -> list[Tensor]:
        """Tokens, targets and document ids `(chunk, context)`; the last chunk is filled up with ignored targets."""
        own = [part[index * self.chunk : (index + 1) * self.chunk] for part in self.batch]
        missing = (0, 0, 0, self.chunk - len(own[0]))
        return [F.pad(x, missing, value=fill).to(device) for x, fill in zip(own, (0, IGNORED, 0), strict=False)]


class Evaluations:
    """Validates a model on rows of a split: at model.context, and at each of eval.contexts. Raises DataError if the
    split is shorter than a row of a context."""

    def __init__(self, tokens: Tokens, tokenizer: Tokenizer, config: Config) -> None:
        self.config = config
        self.context = config.model.context
        rows = rows_of(tokens, config)
        self._n_rows, chosen = len(rows), chosen_rows(rows, config)
        contexts = sorted({*(config.eval.contexts or []), self.context})
        within = rows_within_budget(config, len(contexts))
        self._all = at_contexts(tokens, tokenizer, config, chosen, contexts)
        fewer = within < len(chosen)
        self._early = at_contexts(tokens, tokenizer, config, chosen[:within], contexts) if fewer else self._all
        self._is_early = np.isin(self.at_training_context.numbers, chosen[:within])  # of all chosen rows

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

    def comparable_loss(self, losses: Mapping[int, RowLosses]) -> float:
        """The loss of the rows that each validation of the run takes."""
        rows = losses[self.context]
        if len(rows.loss_sum) < len(self._is_early) or self._is_early.all():
            return float(rows.metrics()["loss"])
        return float(rows.loss_sum[self._is_early].sum() / rows.n_targets[self._is_early].sum())

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
        if wanted is not None and n_targets < wanted and whole.n_rows == self._n_rows:
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
    tokens: Tokens, tokenizer: Tokenizer, config: Config, chosen: NDArray[np.int64], contexts: list[int]
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
        rows = held_out_rows(tokens, tokenizer, replace(config, model=replace(config.model, context=context)))
        here = chosen if context == trained else same_text(chosen, trained, context, len(rows))
        found[context] = Validation(rows, tokenizer.n_bytes, here)
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
        """Writes the files of a step, unless it has a record: a resumed run may repeat a validation. Raises DataError
        if they cannot be written."""
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


def shares(n: int, world: World) -> Iterator[tuple[int, bool]]:
    """This rank's part of the numbers 0 to n - 1, each with True.

    A rank with fewer numbers gets a last one again, with False: FSDP2 gathers weights in every forward pass, so all
    ranks need the same number of passes.
    """
    for index in range(world.rank, world.rank + n, world.size):
        yield min(index, n - 1), index < n


def longest_first(lengths: Sequence[int], fitting: Callable[[int], int]) -> Iterator[list[int]]:
    """The numbers of texts in batches of like length, the longest first, so that too little memory shows at once.

    fitting(length): the number of texts of that length in a batch; a batch has at least one.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    while order:
        n = max(1, fitting(lengths[order[0]]))
        yield order[:n]
        order = order[n:]


@contextmanager
def not_training(model: Decoder, world: World) -> Iterator[None]:
    """Switches dropout off and averages the statistics of all ranks, inside. A collective call."""
    was_training = model.training
    model.eval()
    with averaged_statistics(model, world):
        yield
    model.train(was_training)


@contextmanager
def evaluating(model: Decoder, world: World) -> Iterator[None]:
    """`not_training` without gradients, for texts of any length."""
    with torch.no_grad(), not_training(model, world), uncompiled(model):
        yield


def hash_of(tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> str:
    """16 hex digits of the SHA-256 of N, context, tokens and targets `(N, context)`, as little-endian int64.

    Document masks are left out: models with and without them have the same targets.
    """
    digest = hashlib.sha256()
    for part in (np.array(tokens.shape), tokens, targets):
        digest.update(np.ascontiguousarray(part, dtype="<i8").data)
    return digest.hexdigest()[:16]


def target_counts(train: Rows, vocab_size: int, sample: int = 10_000_000) -> NDArray[np.int64]:
    """The count of each id among about the first `sample` targets, `(vocab_size,)`."""
    counts = np.zeros(vocab_size, np.int64)
    first = 0
    while first < len(train) and counts.sum() < sample:
        _, targets, *_ = train.batch(np.arange(first, min(first + 256, len(train))))
        counts += np.bincount(targets[targets != IGNORED], minlength=vocab_size)
        first += 256
    return counts


def unigram_loss(train: Rows, validation: Validation, vocab_size: int) -> float:
    """The validation loss, in nats per token, of a model that predicts each token by its frequency alone.

    It adds 1 to each count of `target_counts`. A model without a clearly lower loss has not learnt the order of words.
    """
    counts = 1.0 + target_counts(train, vocab_size)
    return float(-np.log(counts / counts.sum())[validation.targets].mean())
