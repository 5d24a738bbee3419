"""What a training row is: a stretch of text, documents that fit together, or a document and its continuation.

A row is written as `context + 1` ids, -1 where there is none: each id but the last is read, each but the first is the
target of the one before. A document is its ids and then eos, and the eos before it opens it: as a target eos
ends one document, as an input it begins the next. So every id of every document is a target, its eos included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED, PADDING

Batch = tuple[NDArray[np.int64], ...]  # tokens, targets and, where the model needs them, document ids: (N, context)
NOTHING = -1  # in place of an id where a row is padded


@dataclass(frozen=True)
class RowFormat:
    """How the ids of a row become what a model takes.

    source_context: tokens that an encoder reads, None for a decoder; pads: whether a row may have fewer ids than fit;
    document_mask: whether attention ends, and positions begin, with each document.
    """

    context: int
    eos: int
    pads: bool = False
    document_mask: bool = False
    source_context: int | None = None

    def batch(self, ids: NDArray[np.integer]) -> Batch:
        """ids: (N, context + 1)."""
        wide: NDArray[np.int64] = ids.astype(np.int64, copy=False)
        tokens, targets = wide[:, :-1], wide[:, 1:]
        if self.source_context is not None:
            # The first token after the source is given to the decoder and never a target, as the TnT authors train.
            predicted = (np.arange(self.context) >= self.source_context) & (targets != NOTHING)
            doc_ids = np.where(tokens != NOTHING, 0, PADDING)
            return np.maximum(tokens, 0), np.where(predicted, targets, IGNORED), doc_ids
        read = targets != NOTHING  # an eos that nothing follows opens no document
        if self.pads:
            tokens, targets = np.where(read, tokens, 0), np.where(read, targets, IGNORED)
        if not self.document_mask:
            return tokens, targets
        doc_ids = (tokens == self.eos).cumsum(axis=1)
        return tokens, targets, np.where(read, doc_ids, PADDING) if self.pads else doc_ids


def row_format(config: Config, eos: int) -> RowFormat:
    """The format that the config asks for."""
    model, data = config.model, config.data
    source = model.source_length(model.context)
    return RowFormat(model.context, eos, data.pack == "best_fit", data.document_mask, source or None)
