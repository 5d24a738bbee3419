"""What every tokenizer is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]


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

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without special ids even where the text spells one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids below vocab_size; special ids vanish, cut UTF-8 becomes U+FFFD."""
        ...
