"""UTF-8 bytes as ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ngpt_train.data.tokenizers.interface import Ids


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

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i != self.eos).decode(errors="replace")
