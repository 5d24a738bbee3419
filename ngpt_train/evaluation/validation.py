"""Loss, perplexity and bits per byte on a fixed set of rows."""

import hashlib
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.core.files import write_atomically
from ngpt_train.data.rows import Rows
from ngpt_train.distributed.layouts import averaged_statistics
from ngpt_train.distributed.world import World
from ngpt_train.models.decoder import Decoder

# Most tokens in one forward pass. Rows that share a matrix product change each other's rounding, so this is a constant;
# train.micro_rows may depend on the number of ranks.
CHUNK_TOKENS = 8_192


@dataclass(frozen=True)
class RowLosses:
    """The loss of each row of a validation set, for means and for pairing two runs row by row.

    loss_sum: (N,) the summed cross-entropy of the row's targets, in nats. n_targets: (N,) their number. n_bytes: the
    text of all targets. rows_hash: identifies the rows.
    """

    loss_sum: NDArray[np.float64]
    n_targets: NDArray[np.int64]
    n_bytes: int
    rows_hash: str

    def metrics(self) -> dict[str, Any]:
        """loss (nats per target), ppl and bits_per_byte; rows, n_targets and rows_hash identify the rows."""
        total, n_targets = float(self.loss_sum.sum()), int(self.n_targets.sum())
        loss = total / n_targets
        return {
            "loss": loss,
            "ppl": math.exp(min(loss, 700.0)),
            # A text without bytes (special ids alone) has no bits per byte.
            "bits_per_byte": total / math.log(2) / self.n_bytes if self.n_bytes else math.nan,
            "rows": len(self.loss_sum),
            "n_targets": n_targets,
            "rows_hash": self.rows_hash,
        }

    def write(self, path: Path) -> None:
        """Writes loss_sum, n_targets and rows_hash as an .npz file, atomically; equal losses give equal bytes."""
        file = io.BytesIO()
        np.savez(file, loss_sum=self.loss_sum, n_targets=self.n_targets, rows_hash=np.array(self.rows_hash))
        write_atomically(path, file.getvalue())


class Validation:
    """Evaluates a model on fixed rows. Each rank computes some chunks of them.

    chosen: (N,) indices of the rows; they are evaluated in ascending order. n_bytes: `(vocab_size,)`, the bytes of text
    of each id, from the tokenizer.
    """

    def __init__(self, rows: Rows, n_bytes: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        batch = rows.batch(np.sort(chosen))  # tokens, targets, ...: (N, context)
        tokens, targets, *_ = batch
        self.batch = [torch.from_numpy(part) for part in batch]
        self.targets = targets[targets != IGNORED]
        self.n_rows, context = targets.shape
        self.n_bytes = int(n_bytes[self.targets].sum())
        self.rows_hash = hash_of(tokens, targets)
        self.chunk = min(self.n_rows, max(1, CHUNK_TOKENS // context))

    @torch.no_grad()
    def row_losses(self, model: Decoder, world: World) -> RowLosses:
        """The loss of each row, in the order of the rows; the same on every rank. A collective call."""
        sums = torch.zeros(self._n_chunks, self.chunk, dtype=torch.float64, device=world.device)
        for index, losses in self._token_losses(model, world):
            sums[index] = losses.double().sum(1)
        # One rank has a row's loss and the others have 0, so the sum over ranks is exact.
        found = world.sum_(sums).flatten()[: self.n_rows].cpu().numpy()
        return RowLosses(found, (self.batch[1] != IGNORED).sum(1).numpy(), self.n_bytes, self.rows_hash)

    @torch.no_grad()
    def token_losses(self, model: Decoder, world: World) -> NDArray[np.float64]:
        """The losses `(N, context)` of all targets; 0 for ignored ones. For one process."""
        assert world.size == 1
        found = np.zeros((self._n_chunks * self.chunk, self.batch[1].shape[1]))
        for index, losses in self._token_losses(model, world):
            n_targets = losses.shape[1]  # an encoder-decoder has no losses for the source
            found[index * self.chunk : (index + 1) * self.chunk, -n_targets:] = losses.double().cpu().numpy()
        return found[: self.n_rows]

    @property
    def _n_chunks(self) -> int:
        return -(-self.n_rows // self.chunk)

    def _token_losses(self, model: Decoder, world: World) -> Iterator[tuple[int, Tensor]]:
        """The number of each of this rank's chunks, and the losses `(chunk, targets)` of its targets."""
        with not_training(model, world):
            for index, counts in shares(self._n_chunks, world):
                losses = model(*self._chunk(index, world.device)).by_token
                if counts:
                    yield index, losses

    def _chunk(self, index: int, device: torch.device) -> list[Tensor]:
        """Tokens, targets and document ids of a chunk, each `(chunk, context)` int64.

        The last chunk is filled up with rows of ignored targets.
        """
        filled = []
        for part, filler in zip(self.batch, (0, IGNORED, 0), strict=False):
            rows = torch.full((self.chunk, part.shape[1]), filler, dtype=torch.int64)
            own = part[index * self.chunk : (index + 1) * self.chunk]
            rows[: len(own)] = own
            filled.append(rows.to(device))
        return filled


def shares(n: int, world: World) -> Iterator[tuple[int, bool]]:
    """This rank's part of the numbers 0 to n - 1, each with True.

    A rank with fewer numbers gets a last one again, with False: FSDP2 gathers weights in every forward pass, so all
    ranks need the same number of passes.
    """
    for index in range(world.rank, world.rank + n, world.size):
        yield min(index, n - 1), index < n


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
    """`not_training` without gradients, for texts of any length. Compiled blocks run uncompiled, because they would be
    compiled again for each length."""
    is_compiled = any(block._compiled_call_impl is not None for block in model.blocks())
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    with torch.no_grad(), not_training(model, world), eager:
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


def unigram_loss(train: Rows, validation: Validation, vocab_size: int, sample: int = 10_000_000) -> float:
    """The validation loss, in nats per token, of a model that predicts each token by its frequency alone.

    It adds 1 to each count of `target_counts`. A model without a clearly lower loss has not learnt the order of words.
    """
    counts = 1.0 + target_counts(train, vocab_size, sample)
    return float(-np.log(counts / counts.sum())[validation.targets].mean())
