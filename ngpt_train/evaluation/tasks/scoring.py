"""Log-probabilities of continuations, given what stands before them.

A continuation is cut into windows that fit the model. A decoder reads at most `context` ids, so a window predicts at
most as many, and reads as many ids before its last target as fit: what does not fit is cut off on the left. An
encoder-decoder is given the id before its first target, at most `context - source_context` ids in all, and its encoder
the `source_context` ids before that one, as in training (data/rows.py: PrefixContinuation).
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
from ngpt_train.evaluation.validation import evaluating
from ngpt_train.models.decoder import Decoder

# Of one forward pass: ids that are read, and numbers among its logits. Both are the same for any number of ranks,
# because rounding depends on which rows share a matrix product.
MOST_TOKENS = 8_192
MOST_LOGITS = 1 << 27


class Scored(NamedTuple):
    """ids: what stands before the continuation, and the continuation. n_targets: ids of the continuation."""

    ids: Sequence[int]
    n_targets: int


class Window(NamedTuple):
    """A row of one forward pass. ids: read by the model but for the last, which is a target alone. source: of them the
    first so many are the encoder's. n_targets: the last so many are scored. of: the number of the continuation."""

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
    """For each continuation: log p(continuation | what stands before it) in nats, and whether each of its ids is the
    most likely one, both `(N,)` and the same on every rank; a collective call.

    Rows are padded on the right, where no scored position sees it. The log-probabilities are computed in fp32 (fp64 for
    an fp64 model) and summed in fp64. The number of ranks changes no bit of a replicated model's result. Raises
    ValueError for a continuation before which nothing stands.
    """
    if any(len(ids) <= n_targets for ids, n_targets in scored):
        raise ValueError("a continuation needs an id before it, from which its first one is predicted")
    cut = windows(model, scored)
    batches = list(_batches(cut, model.config.source_length(model.config.context), model.embedding.shape[0]))
    found = torch.zeros(2, len(cut), dtype=torch.float64, device=world.device)
    with evaluating(model, world):
        # FSDP2 gathers weights in every forward pass, so all ranks make the same number of forward passes.
        for first in range(0, len(batches), world.size):
            index = first + world.rank
            batch = batches[min(index, len(batches) - 1)]
            log_p, is_best = _score(model, [cut[i] for i in batch], world.device)
            if index < len(batches):
                found[0, batch], found[1, batch] = log_p, is_best
    # Only one rank has a window's values, the others have 0, so the sums over ranks are these values, to the bit.
    log_p_of_windows, all_best = world.sum_(found).cpu().numpy()
    sums, greedy = np.zeros(len(scored)), np.ones(len(scored), np.bool_)
    of = np.array([window.of for window in cut], np.int64)
    np.add.at(sums, of, log_p_of_windows)
    np.logical_and.at(greedy, of, all_best > 0)
    return sums, greedy


def _batches(cut: Sequence[Window], source: int, vocab_size: int) -> Iterator[list[int]]:
    """The numbers of windows that share a forward pass: of like lengths, the longest first, so that memory that is too
    small shows at once."""
    order = sorted(range(len(cut)), key=lambda i: -_length(cut[i], source))
    while order:
        length = _length(cut[order[0]], source)
        fitting = max(1, min(MOST_TOKENS // length, MOST_LOGITS // (length * vocab_size)))
        yield order[:fitting]
        order = order[fitting:]


def _length(window: Window, source: int) -> int:
    """Ids that the model reads, with the padding of a source that is too short."""
    return len(window.ids) - 1 - window.source + source


def _score(model: Decoder, batch: Sequence[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """The summed log-probability of the scored targets of each window, and whether all are the most likely ids: `(B,)`
    in fp64."""
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
            doc_ids[row, 0] = 0  # the source is padding alone: one token of it counts, so that attention has a key
        rows += [row] * window.n_targets
        columns += range(end - source - window.n_targets, end - source)  # of logits, which begin behind the source
        targets += window.ids[-window.n_targets :]
    # A decoder needs no mask: what is on the right is not seen.
    masks = {"doc_ids": doc_ids.to(device)} if source else {}
    chosen = model(tokens.to(device), **masks)[rows, columns]  # (targets, V)
    of, wanted = torch.tensor(rows, device=device), torch.tensor(targets, device=device)
    log_p = chosen.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double()
    misses = (chosen.argmax(-1) != wanted).double()
    zeros = torch.zeros(len(batch), dtype=torch.float64, device=device)
    return zeros.index_add(0, of, log_p), (zeros.index_add(0, of, misses) == 0).double()
