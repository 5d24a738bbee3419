"""The interface of a tokenizer, and the encoding of documents of any length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]

# A tokenizer may need a hundred times its text in memory, and SentencePiece more time per character the longer a text
# is. So a document of more characters than this is encoded one stretch at a time.
STRETCH = 1 << 18
# At the end of a stretch this many characters are searched for a place to cut.
SEARCHED = 1 << 14
GUARD = "\n"


class Tokenizer(Protocol):
    """`model` is the content of the model file, `fingerprint` its sha256; `eos` ends each document."""

    kind: str
    name: str
    vocab_size: int
    eos: int
    model: bytes
    fingerprint: str
    n_bytes: NDArray[np.int64]
    """(vocab_size,) bytes of text that each id stands for; 0 for special ids and the unknown piece."""

    def encode(self, text: str) -> Ids:
        """Ids `(n,)` of a text, without special ids even where the text spells one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids below vocab_size; special ids vanish, cut UTF-8 becomes U+FFFD."""
        ...


def tokenizer_identity(tokenizer: Tokenizer) -> list[Any]:
    """[fingerprint, eos], equal for tokenizers that give the same ids: one file may be used with another eos."""
    return [tokenizer.fingerprint, tokenizer.eos]


class BytesTokenizer:
    """Every UTF-8 byte is an id; 256 ends a document."""

    kind = name = "bytes"
    vocab_size = 257
    eos = 256
    model = b""
    fingerprint = hashlib.sha256(b"bytes").hexdigest()

    def __init__(self) -> None:
        self.n_bytes = np.ones(self.vocab_size, np.int64)
        self.n_bytes[self.eos] = 0

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i != self.eos).decode(errors="replace")


def encode_document(tokenizer: Tokenizer, text: str) -> Ids:
    """Ids of a document, as `encode` gives them, but of a long one in bounded memory and linear time.

    More than STRETCH characters are cut before a space after something else, where a word of the usual tokenizers
    begins and their ids stay the same; in text without spaces before a line, or, without lines, anywhere. Wherever
    it is cut, the ids decode to the text as those of a short one do.
    """
    if len(text) <= STRETCH or tokenizer.kind == "words":  # which are looked up line by line
        return tokenizer.encode(text)
    stretches = _stretches(text)
    ids = [tokenizer.encode(next(stretches))]
    # A tokenizer that puts a space before each text would put one at every cut. It goes with the guard.
    guard = GUARD if _adds_space(tokenizer) else ""
    guard_ids = tokenizer.encode(guard) if guard else np.empty(0, np.int32)
    for stretch in stretches:
        row = tokenizer.encode(guard + stretch)
        # Else the guard has become one piece with what follows it; a space too many is what such a model costs.
        is_apart = np.array_equal(row[: len(guard_ids)], guard_ids)
        ids.append(row[len(guard_ids) :] if is_apart else tokenizer.encode(stretch))
    return np.concatenate(ids)


def with_eos(tokenizer: Tokenizer, text: str) -> Ids:
    """Ids of a document, eos at their end, in as few bytes as they need: each stream holds one, however long it is."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    return np.concatenate((encode_document(tokenizer, text), [tokenizer.eos]), dtype=dtype, casting="unsafe")


def _stretches(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > STRETCH:
        end = _cut(text, start + STRETCH)
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(text: str, limit: int) -> int:
    """The last good place at or before `limit`."""
    lowest = limit - SEARCHED
    for character in (" ", "\n"):
        end = limit
        while (place := text.rfind(character, lowest, end)) >= 0:
            if not text[place - 1].isspace():
                return place
            end = place
    return limit


def _adds_space(tokenizer: Tokenizer) -> bool:
    first, second = tokenizer.encode("a"), tokenizer.encode("b")
    return tokenizer.decode(np.concatenate([first, second]).tolist()) != "ab"
