"""What a training row is: a stretch of the token sequence, or a document and its continuation."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.config.architectures import EncoderDecoderKeys, ModelConfig
from ngpt_train.config.keys import DataError
from ngpt_train.data.shards import Tokens, check_length
from ngpt_train.models.decoder import IGNORED

PADDING = -1  # document id of positions that are none


class Rows(Protocol):
    """Numbered rows of `context` tokens each."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """tokens, targets and, where rows are padded, document ids of rows `indices` (N,): (N, context) int64 each."""
        ...


def rows_of(tokens: Tokens, model: ModelConfig) -> Rows:
    """The rows that an architecture is trained on. Raises DataError if the split has none."""
    if isinstance(model, EncoderDecoderKeys):
        return PrefixContinuation(tokens, model.context, model.source_length(model.context))
    return NextToken(tokens, model.context)


class NextToken:
    """Row k is the tokens from k * context on, each the target of the one before it."""

    def __init__(self, tokens: Tokens, context: int) -> None:
        check_length(tokens.split, len(tokens), context, str(tokens.path))
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return self._tokens.n_rows(self._context)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        rows = torch.from_numpy(self._tokens.rows(indices, self._context))
        return rows[:, :-1], rows[:, 1:]


class PrefixContinuation:
    """Row k is the beginning of a document: `source_context` tokens to read, then what follows, to be continued.

    The first token after the source is given to the decoder and never a target, as the TnT authors train.
    Documents with less than one target are left out, the others are padded or cut to the row.
    """

    def __init__(self, tokens: Tokens, context: int, source_context: int) -> None:
        self._tokens, self._context, self._source = tokens, context, source_context
        starts, lengths = tokens.documents()
        long_enough = lengths >= source_context + 2
        self._starts, self._lengths = starts[long_enough], np.minimum(lengths[long_enough], context + 1)
        if not len(self):
            raise DataError(
                f"{tokens.path}: no document of the {tokens.split} split has model.source_context + 2 = "
                f"{source_context + 2} tokens (the longest of {len(lengths):,} has {lengths.max(initial=0):,}); "
                "shorten model.source_context, or add longer documents"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        rows = np.zeros((len(indices), self._context + 1), np.int64)
        lengths = self._lengths[indices]
        for row, start, length in zip(rows, self._starts[indices].tolist(), lengths.tolist(), strict=True):
            self._tokens.read(start, row[:length])
        position = np.arange(self._context)
        targets = np.where((position >= self._source) & (position + 1 < lengths[:, None]), rows[:, 1:], IGNORED)
        doc_ids = np.where(position < lengths[:, None], 0, PADDING)
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(targets), torch.from_numpy(doc_ids)
