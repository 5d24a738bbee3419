"""Classes of targets: each target has one label of every kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import rows_of
from ngpt_train.data.tokenizers.tokenizer import Ints

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# By the first character that is no space; `piece_types` has the rules.
TYPES = (
    "word start",
    "word continuation",
    "digit",
    "punctuation",
    "whitespace",
    "part of a character",
    "end of document",
    "special",
)


def piece_types(ids: Ints, before: Ints, pieces: list[str], eos: int) -> Ints:
    """The index in TYPES of each of `ids`, given the id before it; both of the same shape.

    A piece that begins with a letter, after its spaces, is a word start if it has spaces, or if the piece before does
    not end with a letter; else a continuation.
    """
    alone = np.array([TYPES.index(_type_alone(piece)) for piece in pieces])
    alone[eos] = TYPES.index("end of document")
    begins = np.array([bool(piece) and piece[0].isspace() for piece in pieces])
    ends = np.array([bool(piece) and (piece[-1].isalpha() or piece[-1] == UNKNOWN) for piece in pieces])
    found = alone[ids]
    goes_on = (found == TYPES.index("word start")) & ~begins[ids] & ends[before]
    return np.where(goes_on, TYPES.index("word continuation"), found)


def _type_alone(piece: str) -> str:
    """The type of a piece that does not follow a letter."""
    stripped = piece.lstrip()
    if not stripped:
        return "whitespace" if piece else "special"
    if stripped[0] == UNKNOWN:
        return "part of a character"
    if stripped[0].isalpha():
        return "word start"
    return "digit" if stripped[0].isnumeric() else "punctuation"


@dataclass(frozen=True)
class Classes:
    """labels: `(N, context)` indices in `names`; any index where a target does not count. says: the classes in
    words."""

    kind: str
    says: str
    names: Sequence[str]
    labels: Ints


def of_frequency(targets: Ints, counts: Ints, counted: str) -> Classes:
    """Classes by the target's rank among all ids, the most frequent first: 1 to 10, 11 to 100, ...
    counts: `(vocab_size,)`; equal counts are ranked by id. counted: the counted text, in words."""
    ranks = np.empty(len(counts), np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    ends = [10**power for power in range(1, len(str(len(counts))))] + [len(counts)]
    ends = [end for end, before in zip(ends, [0, *ends], strict=False) if end > before]
    names = [f"{first:,} to {end:,}" for first, end in zip([1, *(end + 1 for end in ends)], ends, strict=False)]
    of_ids = np.where(counts > 0, np.searchsorted(ends, ranks), len(ends))
    labels = of_ids[np.where(targets == IGNORED, 0, targets)]
    return Classes("frequency", f"rank of the target by frequency in {counted}", [*names, "not in it"], labels)


def of_position(targets: Ints) -> Classes:
    """Classes by the target's position in its row from 0: 0, 1, 2 to 3, 4 to 7, ..."""
    context = targets.shape[1]
    octaves = np.array([position.bit_length() for position in range(context)])
    names = [
        f"{first} to {last}" if first < last else str(first)
        for octave in range(int(octaves[-1]) + 1)
        for first, last in [(2 ** (octave - 1) if octave else 0, min(2**octave, context) - 1)]
    ]
    return Classes("position", "position of the target in its row", names, np.broadcast_to(octaves, targets.shape))


def of_type(tokens: Ints, targets: Ints, pieces: list[str], eos: int) -> Classes:
    """Classes by the text of the target, and of the token before it."""
    counting = np.where(targets == IGNORED, 0, targets)
    return Classes("type", "the target's text", TYPES, piece_types(counting, tokens, pieces, eos))


def of_source(validation: Tokens, names: Sequence[str], config: Config, chosen: Ints) -> Classes:
    """Classes by the source of the target's document in the mixture. chosen: the rows `(N,)`. The labels are the rows
    of a text in which each id is the number of its source."""
    lengths = validation.shard_lengths()
    assert len(lengths) == len(names)
    numbers = [np.full(n, number, np.int64) for number, n in enumerate(lengths)]
    # A document must end with eos here exactly if it does in the text.
    ends_with_eos = validation.ids(len(validation) - 1, 1)[0] == validation.eos
    eos = len(names) - 1 if ends_with_eos else len(names)
    starts, _ = validation.documents
    firsts = np.cumsum([0, *lengths])
    offsets = [
        np.append(starts[(starts >= first) & (starts < end)] - first, end - first) for first, end in pairwise(firsts)
    ]
    same_shape = Tokens(validation.split, validation.path, numbers, eos, offsets)
    _, labels, *_ = rows_of(same_shape, config).batch(chosen)
    return Classes("source", "the source of the document", names, labels)
