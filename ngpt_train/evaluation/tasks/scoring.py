"""Log-probabilities of continuations.

A continuation is cut into windows. A window of a decoder has at most `context` targets, and reads at most `context` ids
before its last target; earlier ids are cut off. A window of an encoder-decoder has at most `context - source_context`
targets. Its decoder begins with the id before the first target, and its encoder reads the `source_context` ids before
that, as in training (data/rows.py: PrefixContinuation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.core.constants import PADDING
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.validation import CHUNK_TOKENS, evaluating, shares
from ngpt_train.models.decoder import Decoder

MOST_LOGITS = 1 << 27  # numbers among the logits of one forward pass


class Scored(NamedTuple):
    """A text to score. ids: of the context and the continuation. n_targets: ids of the continuation."""

    ids: Sequence[int]
    n_targets: int


class Window(NamedTuple):
    """A row of one forward pass. ids: the model reads all but the last one. source: the number of ids for the encoder,
    the first ones. n_targets: the number of scored ids, the last ones. of: the number of the continuation."""

    ids: Sequence[int]
    source: int
    n_targets: int
    of: int


def windows(model: Decoder, scored: Sequence[Scored]) -> list[Window]:
    """The windows of all continuations, in order."""
    context, source = model.config.context, model.config.source_length(model.config.context)
    at_once = context - source
    found = []
    for number, (ids, n_targets) in enumerate(scored):
        for start in range(len(ids) - n_targets, len(ids), at_once):
            end = min(start + at_once, len(ids))
            first = max(0, start - 1 - source if source else end - 1 - context)
            n_source = start - 1 - first if source else 0
            found.append(Window(ids[first:end], n_source, end - start, number))
    return found


def log_likelihoods(
    model: Decoder, scored: Sequence[Scored], world: World
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """log p(continuation | context) in nats, and True if each id of the continuation is the most likely one.

    Both are `(N,)`, and the same on every rank. A collective call.

    Padding is on the right, where no scored position sees it. Log-probabilities are computed in fp32 (fp64 for an fp64
    model) and summed in fp64. The number of ranks changes no bit of a replicated model's result. Raises ValueError for
    a continuation without a context.
    """
    if any(len(ids) <= n_targets for ids, n_targets in scored):
        raise ValueError("a continuation needs a context of one id or more")
    cut = windows(model, scored)
    batches = list(_batches(cut, model.config.source_length(model.config.context), model.embedding.shape[0]))
    found = torch.zeros(2, len(cut), dtype=torch.float64, device=world.device)
    with evaluating(model, world):
        for index, counts in shares(len(batches), world):
            log_p, is_best = _score(model, [cut[i] for i in batches[index]], world.device)
            if counts:
                found[0, batches[index]], found[1, batches[index]] = log_p, is_best
    # One rank has a window's values and the others have 0, so the sums over ranks are exact.
    log_p_of_windows, all_best = world.sum_(found).cpu().numpy()
    sums, greedy = np.zeros(len(scored)), np.ones(len(scored), np.bool_)
    of = np.array([window.of for window in cut], np.int64)
    np.add.at(sums, of, log_p_of_windows)
    np.logical_and.at(greedy, of, all_best > 0)
    return sums, greedy


def _batches(cut: Sequence[Window], source: int, vocab_size: int) -> Iterator[list[int]]:
    """The windows of each forward pass, by their numbers. The longest come first, so that too little memory shows at
    once."""
    order = sorted(range(len(cut)), key=lambda i: -_length(cut[i], source))
    while order:
        length = _length(cut[order[0]], source)
        fitting = max(1, min(CHUNK_TOKENS // length, MOST_LOGITS // (length * vocab_size)))
        yield order[:fitting]
        order = order[fitting:]


def _length(window: Window, source: int) -> int:
    """The number of ids that the model reads, including a short source's padding."""
    return len(window.ids) - 1 - window.source + source


def _score(model: Decoder, batch: Sequence[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """The summed log-probability of each window's targets, and 1 if all are the most likely ids, else 0: two `(B,)`
    fp64."""
    source = model.config.source_length(model.config.context)
    length = max(_length(window, source) for window in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.int64)
    doc_ids = torch.full_like(tokens, PADDING)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for row, window in enumerate(batch):
        ids = torch.as_tensor(window.ids)
        read = ids[:-1]
        tokens[row, : window.source], doc_ids[row, : window.source] = read[: window.source], 0
        end = source + len(read) - window.source
        tokens[row, source:end], doc_ids[row, source:end] = read[window.source :], 0
        if source and not window.source:
            doc_ids[row, 0] = 0  # the source is all padding: one token of it counts, so that attention has a key
        rows += [row] * window.n_targets
        columns += range(end - source - window.n_targets, end - source)  # of logits, which begin behind the source
        targets += window.ids[-window.n_targets :]
    # A decoder needs no mask: it does not see the padding on the right.
    masks = {"doc_ids": doc_ids.to(device)} if source else {}
    chosen = model(tokens.to(device), **masks)[rows, columns]  # (targets, V)
    of, wanted = torch.tensor(rows, device=device), torch.tensor(targets, device=device)
    log_p = chosen.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double()
    misses = (chosen.argmax(-1) != wanted).double()
    zeros = torch.zeros(len(batch), dtype=torch.float64, device=device)
    return zeros.index_add(0, of, log_p), (zeros.index_add(0, of, misses) == 0).double()
