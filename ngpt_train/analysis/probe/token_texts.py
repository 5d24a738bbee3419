"""The text of each id, and the type of that text."""

import numpy as np
from numpy.typing import NDArray

from ngpt_train.data.tokenizers.tokenizer import Tokenizer

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


def pieces_of(tokenizer: Tokenizer) -> list[str]:
    """The text of each id, spaces included, by id: `(vocab_size,)` texts.

    Each id is decoded after a letter, because at the beginning of a text some tokenizers leave the space out. A part of
    a longer character is U+FFFD; a special id has an empty text.
    """
    letter = [int(i) for i in tokenizer.encode("a")]
    before = tokenizer.decode(letter)
    return [tokenizer.decode([*letter, i])[len(before) :] for i in range(tokenizer.vocab_size)]


def piece_types(ids: NDArray[np.int64], before: NDArray[np.int64], pieces: list[str], eos: int) -> NDArray[np.int64]:
    """The index in TYPES of each of `ids`, given the id before it; both of the same shape.

    A piece that begins with a letter, after its spaces, is a word start if it has spaces, or if the piece before does
    not end with a letter; else a continuation.
    """
    alone = np.array([_type_alone(piece) for piece in pieces])
    alone[eos] = TYPES.index("end of document")
    begins = np.array([bool(piece) and piece[0].isspace() for piece in pieces])
    ends = np.array([bool(piece) and (piece[-1].isalpha() or piece[-1] == UNKNOWN) for piece in pieces])
    found = alone[ids]
    goes_on = (found == TYPES.index("word start")) & ~begins[ids] & ends[before]
    return np.where(goes_on, TYPES.index("word continuation"), found)


def _type_alone(piece: str) -> int:
    """The index in TYPES of a piece that does not follow a letter."""
    stripped = piece.lstrip()
    if not piece:
        return TYPES.index("special")
    if not stripped:
        return TYPES.index("whitespace")
    if stripped[0] == UNKNOWN:
        return TYPES.index("part of a character")
    if stripped[0].isalpha():
        return TYPES.index("word start")
    return TYPES.index("digit" if stripped[0].isnumeric() else "punctuation")
