"""Hugging Face's tokenizer.json."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json
from ngpt_train.data.tokenizers.gpt2 import byte_of_character
from ngpt_train.data.tokenizers.sentence_piece import SPACE_SYMBOL
from ngpt_train.data.tokenizers.tokenizer import Ids

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class HuggingFaceTokenizer:
    """A tokenizer.json whose pieces are bytes (byte-level BPE), or text with \u2581 for the space.

    eos: the piece that ends each document, or its id. The file does not name it.
    """

    kind = "hf"

    def __init__(self, model: bytes, eos: str | int | None, where: str, key: str = "tokenizer.eos"):
        """where, key: the file and the key of eos, for messages. Raises DataError."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError(
                "tokenizer=hf: the package tokenizers is not installed; pip install 'ngpt-train[tokenizers]'"
            ) from None
        try:
            self._tokenizer = Tokenizer.from_buffer(model)
            described = parse_json(model)
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{where}: not a tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # a special piece spelled in a text is text
        pieces = {i: piece for piece, i in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        special = {i for i, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self.vocab_size = max(pieces) + 1
        self.eos = eos if eos in pieces else _find_eos(eos, {pieces[i]: i for i in special}, where, key)
        self.eos_piece = pieces[self.eos]
        self.model = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.name = f"hf-{self.vocab_size}-{self.fingerprint[:8]}"
        length = _length_of_pieces(described, where)
        unknown = (described["model"] or {}).get("unk_token")
        self.n_bytes = np.zeros(self.vocab_size, np.int64)
        for i, piece in pieces.items():
            if i not in special and piece != unknown:
                self.n_bytes[i] = length(piece)

    def __reduce__(self) -> tuple[Any, ...]:
        # The package's own pickle loses encode_special_tokens.
        return HuggingFaceTokenizer, (self.model, self.eos, self.name)

    def encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


# Its names in well-known files. If a file has none or several of them, the user has to choose.
USUAL_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


def _find_eos(eos: str | int | None, special: dict[str, int], where: str, key: str) -> int:
    names = [eos] if eos is not None else [name for name in USUAL_EOS if name in special]
    if len(names) == 1 and names[0] in special:
        return special[names[0]]
    problem = "which piece ends a document?" if eos is None else f"no special piece {eos!r}."
    listed = ", ".join(map(repr, sorted(special)[:20])) or "none"
    raise DataError(f"{where}: {problem} Set {key} to one of its special pieces: {listed}")


def _length_of_pieces(described: dict[str, Any], where: str) -> Callable[[str], int]:
    """A function that gives the bytes of text of a piece."""
    kinds = set(_types(described.get("pre_tokenizer"))) | set(_types(described.get("decoder")))
    if "ByteLevel" in kinds:
        characters = byte_of_character().keys()
        # An added piece is plain text. In other pieces each character is a byte.
        return lambda piece: len(piece) if piece and all(c in characters for c in piece) else len(piece.encode())
    if kinds & {"Metaspace", "ByteFallback"}:
        return lambda piece: 1 if _BYTE.fullmatch(piece) else len(piece.replace(SPACE_SYMBOL, " ").encode())
    raise DataError(
        f"{where}: neither a byte-level tokenizer nor one of SentencePiece's kind, so nobody knows how many bytes "
        "a piece stands for; bits per byte would be wrong"
    )


def _types(component: Any) -> Iterator[str]:
    """The kinds of a component of tokenizer.json and of its inner components."""
    if isinstance(component, dict):
        yield str(component.get("type"))
        for inner in (*component.get("pretokenizers", ()), *component.get("decoders", ())):
            yield from _types(inner)
