"""Loss, perplexity and bits per byte on a fixed set of rows."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.data import Rows, validation_rows
from ngpt_train.distributed import World, averaged_statistics
from ngpt_train.models import Decoder

# The seed of the validation rows. It is not run.seed, so that runs with different seeds are measured on the same text.
SEED = 0
# Most tokens in one forward pass. It is not train.micro_rows, which may depend on the number of ranks: rounding depends
# on which rows share a matrix product.
CHUNK_TOKENS = 8_192


class Validation:
    """Evaluates a model on `n_rows` seeded rows. Each rank computes some chunks of them.

    n_bytes: `(vocab_size,)`, the number of bytes of text that each id stands for, from the tokenizer.
    """

    def __init__(self, rows: Rows, n_bytes: NDArray[np.int64], n_rows: int) -> None:
        batch = rows.batch(validation_rows(rows, n_rows, SEED))  # tokens, targets, ...: (n_rows, context)
        targets = batch[1]
        self.batch = [torch.from_numpy(part) for part in batch]
        self.targets = targets[targets != IGNORED]  # those that count
        self.n_rows, context = targets.shape
        self.n_bytes = int(n_bytes[self.targets].sum())
        self.chunk = min(self.n_rows, max(1, CHUNK_TOKENS // context))

    @torch.no_grad()
    def __call__(self, model: Decoder, world: World) -> dict[str, Any]:
        """loss (nats per token), ppl and bits_per_byte of the targets; the same on every rank. A collective call."""
        was_training = model.training
        model.eval()
        n_chunks = -(-self.n_rows // self.chunk)
        sums = torch.zeros(n_chunks, dtype=torch.float64, device=world.device)
        # FSDP2 gathers weights in every forward pass, so all ranks make the same number of forward passes.
        with averaged_statistics(model, world):
            for first in range(0, n_chunks, world.size):
                index = first + world.rank
                loss_sum, _ = model.loss(*self._chunk(index, world.device))
                if index < n_chunks:
                    sums[index] = loss_sum
        model.train(was_training)
        # Only one rank has a chunk's loss, the others have 0. All ranks sum the chunks in the same order, so the total
        # does not depend on the number of ranks.
        total = float(world.sum_(sums).sum())
        loss = total / len(self.targets)
        # A text without bytes (special ids alone) has no bits per byte.
        bits_per_byte = total / math.log(2) / self.n_bytes if self.n_bytes else math.nan
        return {"loss": loss, "ppl": math.exp(min(loss, 700.0)), "bits_per_byte": bits_per_byte}

    def _chunk(self, index: int, device: torch.device) -> list[Tensor]:
        """Tokens, targets and document ids of a chunk, each `(chunk, context)` int64.

        If there are too few rows, the chunk is filled up with rows whose targets do not count.
        """
        filled = []
        for part, filler in zip(self.batch, (0, IGNORED, 0), strict=False):
            rows = torch.full((self.chunk, part.shape[1]), filler, dtype=torch.int64)
            own = part[index * self.chunk : (index + 1) * self.chunk]
            rows[: len(own)] = own
            filled.append(rows.to(device))
        return filled


def unigram_loss(train: Rows, validation: Validation, vocab_size: int, sample: int = 10_000_000) -> float:
    """Validation loss, in nats per token, of the model that predicts each token by its frequency alone.

    Frequencies are counted in about the first `sample` training targets, with 1 added to each count. A model whose
    validation loss is not clearly lower has learnt nothing about the order of words.
    """
    counts = np.ones(vocab_size)
    first = 0
    while first < len(train) and counts.sum() < sample + vocab_size:
        _, targets, *_ = train.batch(np.arange(first, min(first + 256, len(train))))
        counts += np.bincount(targets[targets != IGNORED], minlength=vocab_size)
        first += 256
    return float(-np.log(counts / counts.sum())[validation.targets].mean())
