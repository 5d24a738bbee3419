"""The interface of a tokenizer, and the encoding of documents of any length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]

# Characters of a stretch. A longer document is encoded one stretch at a time: a tokenizer may need a hundred times its
# text in memory, and SentencePiece needs more time per character in a longer text.
STRETCH = 1 << 18
# Characters at the end of a stretch that are searched for a place to cut.
SEARCHED = 1 << 14
GUARD = "\n"


class Tokenizer(Protocol):
    """Text to ids and back."""

    kind: str
    name: str
    vocab_size: int
    eos: int  # ends each document
    model: bytes  # content of the model file
    fingerprint: str  # its sha256
    n_bytes: NDArray[np.int64]  # (vocab_size,) bytes of text of each id; 0 for special ids and the unknown piece

    def encode(self, text: str) -> Ids:
        """Ids `(n,)` of a text. Never special ids, even if the text spells one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids below vocab_size, without special ids. Cut UTF-8 becomes U+FFFD."""
        ...


def tokenizer_identity(tokenizer: Tokenizer) -> list[Any]:
    """[fingerprint, eos]. Tokenizers with equal identities give equal ids. One file may be used with another eos."""
    return [tokenizer.fingerprint, tokenizer.eos]


class BytesTokenizer:
    """Every UTF-8 byte is an id. 256 is eos."""

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
    """`encode` in bounded memory and linear time.

    A text of more than STRETCH characters is cut before a space that follows another character. A word of the usual
    tokenizers begins there, so their ids stay the same. Text without spaces is cut before a line, and text without
    lines anywhere. The ids always decode to the text.
    """
    if len(text) <= STRETCH or tokenizer.kind == "words":  # words are looked up line by line
        return tokenizer.encode(text)
    stretches = _stretches(text)
    ids = [tokenizer.encode(next(stretches))]
    # A tokenizer that puts a space before each text would put one at every cut. The guard takes it away.
    guard = GUARD if _adds_space(tokenizer) else ""
    guard_ids = tokenizer.encode(guard) if guard else np.empty(0, np.int32)
    for stretch in stretches:
        row = tokenizer.encode(guard + stretch)
        # Else the guard has become one piece with the text after it, and the stretch keeps its space.
        is_apart = np.array_equal(row[: len(guard_ids)], guard_ids)
        ids.append(row[len(guard_ids) :] if is_apart else tokenizer.encode(stretch))
    return np.concatenate(ids)


def with_eos(tokenizer: Tokenizer, text: str) -> Ids:
    """Ids of a document with eos at the end, in the smallest dtype: each stream holds a document of any length."""
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
    """The last good place to cut, at or before `limit`."""
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
