"""Loss, perplexity and bits per byte on a fixed set of rows."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.data import Tokens, validation_rows
from ngpt_train.distributed import World, averaged_statistics
from ngpt_train.models import Decoder
from ngpt_train.models.decoder import IGNORED

# The rows do not depend on run.seed, so that runs with different seeds are measured on the same text.
SEED = 0
# Tokens in one forward pass. Not train.micro_rows: the rows that share a matrix product, and with
# them the rounding, must not depend on the number of ranks.
CHUNK_TOKENS = 8_192


class Validation:
    """Evaluates a model on `rows` seeded rows of `tokens`, the chunks shared by the ranks.

    n_bytes: `(vocab_size,)` bytes of text behind each id, from the tokenizer.
    """

    def __init__(self, tokens: Tokens, n_bytes: NDArray[np.int64], context: int, rows: int) -> None:
        self.rows = tokens.rows(validation_rows(tokens, context, rows, SEED), context)  # (rows, context + 1)
        self.n_bytes = int(n_bytes[self.rows[:, 1:]].sum())
        self.chunk = min(len(self.rows), max(1, CHUNK_TOKENS // context))

    @torch.no_grad()
    def __call__(self, model: Decoder, world: World) -> dict[str, Any]:
        """loss (nats per token), ppl, bits_per_byte of the target text; the same on every rank. Collective."""
        was_training = model.training
        model.eval()
        n_chunks = -(-len(self.rows) // self.chunk)
        sums = torch.zeros(n_chunks, dtype=torch.float64, device=world.device)
        # FSDP2 gathers weights in every forward pass, so all ranks make the same number of them.
        with averaged_statistics(model, world):
            for first in range(0, n_chunks, world.size):
                index = first + world.rank
                loss_sum, _ = model.loss(*self._chunk(index, world.device))
                if index < n_chunks:
                    sums[index] = loss_sum
        model.train(was_training)
        # Each entry is one rank's number plus zeros, and they are added in one order: no rounding of its own.
        total = float(world.sum_(sums).sum())
        loss = total / self.rows[:, 1:].size
        # A text without bytes (special ids alone) has no bits per byte.
        bits_per_byte = total / math.log(2) / self.n_bytes if self.n_bytes else math.nan
        return {"loss": loss, "ppl": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}

    def _chunk(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets `(chunk, context)` of one chunk, filled up with rows that do not count."""
        rows = torch.from_numpy(self.rows[index * self.chunk : (index + 1) * self.chunk])
        tokens = torch.zeros(self.chunk, self.rows.shape[1] - 1, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        tokens[: len(rows)], targets[: len(rows)] = rows[:, :-1], rows[:, 1:]
        return tokens.to(device), targets.to(device)


def unigram_loss(train: Tokens, validation: Validation, vocab_size: int, sample: int = 10_000_000) -> float:
    """Nats per token of the model that knows how frequent each token is and nothing else.

    Counted on the first `sample` training tokens, one added to each count. A model that is not clearly
    below it on the validation rows has learnt nothing about the order of words.
    """
    context = validation.rows.shape[1] - 1
    n_rows = min(train.n_rows(context), max(1, sample // context))
    counts = np.ones(vocab_size)
    for first in range(0, n_rows, 1024):
        rows = train.rows(np.arange(first, min(first + 1024, n_rows)), context)
        counts += np.bincount(rows[:, 1:].ravel(), minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[validation.rows[:, 1:]].mean())
