"""Masked rows: which tokens a bidirectional model predicts, and what it reads in their place.

BERT's objective (Devlin et al. 2019) with RoBERTa's dynamic masks (Liu et al. 2019). Of a row's n tokens floor(s n + u)
are chosen, s = model.mask_share, u uniform in [0, 1). The model reads the mask id in their place, or with probability
data.mask_keep the token itself, or with probability data.mask_random a random token. It predicts the chosen tokens.

A mask is a function of a seed and the row's number in the run. So it is new each time that a row is read, and the same
for any number of ranks and after any resume. The rows of a validation have one mask each, the same for all runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ngpt_train.core.constants import IGNORED
from ngpt_train.data.permutation import keyed_hash, uniform
from ngpt_train.data.tokenizers.tokenizer import Ints, pieces_of

if TYPE_CHECKING:  # rows are masked, and know how
    from ngpt_train.config.schema import Config
    from ngpt_train.data.rows import Batch
    from ngpt_train.data.tokenizers.tokenizer import Tokenizer

NOT_THE_ORDER = 1  # of keyed_hash, so that masks do not depend on the order of the rows


@dataclass(frozen=True)
class Masks:
    """Chooses and hides tokens. Ids below `mask_id` are the tokenizer's; mask_id is the one after them."""

    share: float
    keep: float
    random: float
    mask_id: int
    eos: int
    begins_word: NDArray[np.bool_] | None  # (mask_id,), to choose whole words; None: tokens

    def of(self, batch: Batch, numbers: Ints, seed: int) -> Batch:
        """The rows with hidden tokens, and as targets the chosen tokens at their own positions.

        batch: as of `Rows.batch`. A token counts if it has a target there, that is, if it is no padding and in no row
        before. numbers (N,): of the rows.
        """
        tokens, targets, *doc_ids = batch
        N, T = tokens.shape
        width = 3 * T + 1
        places = numbers[:, None] * width + np.arange(width)
        draws = uniform(places.ravel(), keyed_hash(seed, NOT_THE_ORDER)).reshape(N, width)
        order, action, of_vocabulary, rounding = np.split(draws, [T, 2 * T, 3 * T], axis=1)
        counts = targets != IGNORED
        wanted = np.floor(self.share * counts.sum(axis=1) + rounding[:, 0]).astype(np.int64)
        chosen = self._chosen(tokens, counts, order, wanted)

        replacement = (of_vocabulary * (self.mask_id - 1)).astype(np.int64)
        replacement += replacement >= self.eos  # any token but eos
        read = np.where(action < self.keep, tokens, self.mask_id)
        read = np.where(action >= 1 - self.random, replacement, read)
        return np.where(chosen, read, tokens), np.where(chosen, tokens, IGNORED), *doc_ids

    def _chosen(
        self, tokens: Ints, counts: NDArray[np.bool_], order: NDArray[np.float64], wanted: Ints
    ) -> NDArray[np.bool_]:
        """(N, T): `wanted` (N,) of the tokens that count, in the order of their draws; of whole words at most so many,
        a word that would be one too many is left out."""
        if self.begins_word is None:
            ranks = np.where(counts, order, 2.0).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
            return counts & (ranks < wanted[:, None])
        chosen = np.zeros_like(counts)
        for row in range(len(tokens)):
            place = np.flatnonzero(counts[row])
            begins = self.begins_word[tokens[row, place]]
            begins[1:] |= tokens[row, place[:-1]] == self.eos  # the first piece of a text may lack its space
            words = np.cumsum(begins)  # the row may begin within a word
            _, firsts, lengths = np.unique(words, return_index=True, return_counts=True)
            left = int(wanted[row])
            for word in order[row, place[firsts]].argsort(kind="stable"):
                if lengths[word] <= left:
                    left -= lengths[word]
                    chosen[row, place[firsts[word] : firsts[word] + lengths[word]]] = True
        return chosen


def masks_of(config: Config, tokenizer: Tokenizer) -> Masks | None:
    """The masks of the config's objective; None for an objective without masks."""
    data = config.data
    if data.objective != "masked":
        return None
    shares = config.model.mask_share, data.mask_keep, data.mask_random
    return Masks(*shares, tokenizer.vocab_size, tokenizer.eos, begins_word(tokenizer) if data.mask_words else None)


def begins_word(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """(vocab_size,): true for an id whose text begins with white space, and for eos."""
    return np.array([i == tokenizer.eos or text[:1].isspace() for i, text in enumerate(pieces_of(tokenizer))])
