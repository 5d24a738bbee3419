"""Rows of examples with a label: one or several texts, and the class or number that a model shall answer.

A row is eos and the texts with eos behind each, padded to model.context, so that records count what is computed; of an
example that is too long the longest text is cut. The target is the label, at the place that has read all: the last
token of a decoder, the first of a bidirectional model, the decoder's first token, eos, of an encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ngpt_train.core.constants import IGNORED, PADDING

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config
    from ngpt_train.data.dataset import Examples
    from ngpt_train.data.tokenizers.tokenizer import Ids


class LabelRows:
    """Row k is example k of a split, in a form that the config's model reads."""

    def __init__(self, examples: Examples, config: Config) -> None:
        model, self._examples = config.model, examples
        self._context, self._source = model.context, model.source_length(model.context)
        self._reads_first = model.bidirectional

    def __len__(self) -> int:
        return len(self._examples.labels)

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Tokens, targets and document ids, each (N, context)."""
        shape = len(indices), self._context
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        doc_ids = np.full(shape, PADDING, np.int64)
        for row, index in enumerate(indices.tolist()):
            ids = joined(self._examples.texts[index], self._examples.eos, self._source or self._context)
            tokens[row, : len(ids)] = ids
            doc_ids[row, : len(ids)] = 0
            place = 0 if self._reads_first else len(ids) - 1
            if self._source:
                place = self._source
                tokens[row, place], doc_ids[row, place] = self._examples.eos, 0
            targets[row, place] = self._examples.labels[index]
        return tokens, targets, doc_ids


def joined(texts: Sequence[Ids], eos: int, most: int) -> NDArray[np.int64]:
    """eos and the texts with eos behind each, at most `most` ids: the longest text is cut."""
    lengths = [len(ids) for ids in texts]
    while 1 + sum(lengths) + len(lengths) > most:
        lengths[int(np.argmax(lengths))] -= 1
    parts = [np.array([eos])]
    for ids, length in zip(texts, lengths, strict=True):
        parts += [ids[:length], np.array([eos])]
    return np.concatenate(parts).astype(np.int64)
