"""Text to token ids and back: raw bytes, SentencePiece, GPT-2's byte-pair encoding.

A tokenizer is its kind and the bytes of its model file, so it can be written beside the tokens it
made (`write_tokenizer`) and read again on a machine that has neither its source nor a network.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.keys import DataError
from ngpt_train.config.schema import TokenizerConfig

Ids = NDArray[np.integer]

DOWNLOAD_SECONDS = 20.0
# Stands for the space in SentencePiece's pieces; decoding turns every one of them into a space.
SPACE_SYMBOL = "\u2581"


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


def load_tokenizer(config: TokenizerConfig, corpus: Iterable[str] | None = None) -> Tokenizer:
    """The tokenizer that the config names; `corpus` is the text for one that is to be trained.

    Raises DataError if it cannot be had or does not fit the corpus.
    """
    if config.kind == "bytes":
        return BytesTokenizer()
    if config.kind == "gpt2":
        return GPT2Tokenizer(_gpt2_ranks())
    if config.path is not None:
        path = Path(config.path).expanduser()
        try:
            model = path.read_bytes()
        except OSError as error:
            raise DataError(f"tokenizer.path={config.path}: cannot be read ({error.strerror})") from None
        return SentencePieceTokenizer(model, f"tokenizer.path={config.path}")
    if corpus is None:
        raise DataError(
            "tokenizer.path=null: there is no text here to train a SentencePiece model from; choose the tokenizer "
            "that made these tokens: tokenizer=gpt2, tokenizer=bytes, or tokenizer=sentencepiece tokenizer.path=FILE"
        )
    return SentencePieceTokenizer(train_sentencepiece(corpus, config.vocab_size), "the trained model")


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> dict[str, Any]:
    """Writes the model file, if the kind has one, into `directory`; returns the JSON that describes the tokenizer."""
    file = {"bytes": None, "sentencepiece": "tokenizer.model", "gpt2": "tokenizer.tiktoken"}[tokenizer.kind]
    if file is not None:
        (directory / file).write_bytes(tokenizer.model)
    return {
        "kind": tokenizer.kind,
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        "file": file,
        "fingerprint": tokenizer.fingerprint,
    }


def read_tokenizer(directory: Path, entry: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `write_tokenizer` put into `directory`. Raises DataError if its file is missing or changed."""
    if entry["kind"] == "bytes":
        return BytesTokenizer()
    path = directory / entry["file"]
    try:
        model = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: the tokenizer of these tokens cannot be read ({error.strerror})") from None
    if hashlib.sha256(model).hexdigest() != entry["fingerprint"]:
        raise DataError(f"{path}: not the tokenizer that made these tokens (its checksum differs); copy it again")
    if entry["kind"] == "gpt2":
        return GPT2Tokenizer(_parse_ranks(model))
    return SentencePieceTokenizer(model, str(path))


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


class SentencePieceTokenizer:
    """A SentencePiece model. Lossless if its normalisation is the identity and it falls back to bytes."""

    kind = "sentencepiece"

    def __init__(self, model: bytes, where: str):
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise DataError(f"{where}: not a SentencePiece model") from None
        self.model = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.name = f"sentencepiece-{self.vocab_size}-{self.fingerprint[:8]}"
        self.eos: int = self._processor.eos_id()
        if self.eos < 0 or not self._processor.is_control(self.eos):
            raise DataError(f"{where}: the model has no end-of-sentence control piece, which has to end each document")
        self.n_bytes = np.array([self._piece_bytes(i) for i in range(self.vocab_size)], np.int64)
        self._space_symbol = self._space_symbol_ids()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        ids = self._processor.encode(list(texts), out_type=int)
        if self._space_symbol is not None:
            for i, text in enumerate(texts):
                if SPACE_SYMBOL in text:
                    ids[i] = self._encode_around_space_symbol(text)
        return [np.array(row, np.int32) for row in ids]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def _piece_bytes(self, i: int) -> int:
        if self._processor.is_control(i) or self._processor.is_unknown(i):
            return 0
        if self._processor.is_byte(i):
            return 1
        return len(self._processor.id_to_piece(i).replace(SPACE_SYMBOL, " ").encode())

    def _space_symbol_ids(self) -> list[int] | None:
        """Byte pieces that spell SPACE_SYMBOL; None where the model has none or puts a space before each text."""
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        adds_space = self._processor.encode("a", out_type=str)[0].startswith(SPACE_SYMBOL)
        return None if adds_space or not all(map(self._processor.is_byte, ids)) else ids

    def _encode_around_space_symbol(self, text: str) -> list[int]:
        assert self._space_symbol is not None
        first, *rest = self._processor.encode(text.split(SPACE_SYMBOL), out_type=int)
        return first + [i for part in rest for i in [*self._space_symbol, *part]]


def train_sentencepiece(corpus: Iterable[str], vocab_size: int) -> bytes:
    """Model file of a byte-pair encoding of `corpus`, the same for the same text; decoding gives back any text."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            # What makes it lossless: characters outside the alphabet become bytes, and white space stays as it is.
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Indentation in one piece.
            allow_whitespace_only_pieces=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=1 << 30,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        given = f"tokenizer.vocab_size={vocab_size}"
        if largest := re.search(r"too high .* value <= (\d+)", str(error)):
            raise DataError(
                f"{given}: the corpus is too small for so many pieces; the largest that works is {largest[1]} "
                "(tokenizer=bytes works for any corpus)"
            ) from None
        if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise DataError(
                f"{given}: fewer than the characters of the corpus; the smallest that works is {smallest[1]}"
            ) from None
        raise DataError(f"{given}: SentencePiece cannot be trained from this corpus ({error})") from None
    return model.getvalue()


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding as tiktoken runs it; `ranks` maps the bytes of a token to its id."""

    kind = name = "gpt2"

    def __init__(self, ranks: dict[bytes, int]):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self.eos = len(ranks)
        self.vocab_size = self.eos + 1
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.eos}
        )
        tokens = sorted(ranks, key=ranks.__getitem__)
        self.model = b"".join(b"%s %d\n" % (base64.b64encode(token), ranks[token]) for token in tokens)
        self.fingerprint = hashlib.sha256(self.model).hexdigest()
        self.n_bytes = np.array([*map(len, tokens), 0], np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        ids = self._encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.array(row, np.int32) for row in ids]

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if i != self.eos])


def _parse_ranks(model: bytes) -> dict[bytes, int]:
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in model.splitlines())}


def _gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's vocabulary from tiktoken's cache, or else its download, which has no deadline of its own."""
    from tiktoken_ext.openai_public import gpt2

    result: list[dict[bytes, int]] = []
    problem = f"no answer in {DOWNLOAD_SECONDS:.0f} s"

    def fetch() -> None:
        nonlocal problem
        try:
            result.append(gpt2()["mergeable_ranks"])
        except Exception as error:
            problem = type(error).__name__

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if not result:
        raise DataError(
            f"tokenizer=gpt2: the vocabulary cannot be downloaded ({problem}). On a machine with a network run "
            "TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")', copy DIR here and "
            "set TIKTOKEN_CACHE_DIR=DIR; or choose tokenizer=sentencepiece or tokenizer=bytes"
        )
    return result[0]
