"""SentencePiece models, and their training."""

import hashlib
import io
import re
from collections.abc import Iterable

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.data.tokenizers.tokenizer import Ids

# The space in SentencePiece's pieces. Decoding turns each one into a space.
SPACE_SYMBOL = "\u2581"


class SentencePieceTokenizer:
    """A SentencePiece model. Lossless if its normalisation is the identity and it falls back to bytes.

    vocab_size: for a model with more ids than pieces. No text becomes one of the further ids, and they decode to none.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, where: str, name: str | None = None, vocab_size: int | None = None):
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise DataError(f"{where}: not a SentencePiece model") from None
        self.model = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.n_pieces: int = self._processor.vocab_size()
        self.vocab_size = vocab_size or self.n_pieces
        if self.vocab_size < self.n_pieces:
            raise DataError(f"{where}: the model has {self.n_pieces} pieces, and its description says {vocab_size}")
        self.name = name or f"sentencepiece-{self.vocab_size}-{self.fingerprint[:8]}"
        self.eos: int = self._processor.eos_id()
        if self.eos < 0 or not self._processor.is_control(self.eos):
            raise DataError(f"{where}: the model has no end-of-sentence control piece, which has to end each document")
        self.n_bytes = np.zeros(self.vocab_size, np.int64)
        self.n_bytes[: self.n_pieces] = [self._piece_bytes(i) for i in range(self.n_pieces)]
        self._space_symbol = self._space_symbol_ids()

    def encode(self, text: str) -> Ids:
        if self._space_symbol is not None and SPACE_SYMBOL in text:
            first, *rest = self._processor.encode(text.split(SPACE_SYMBOL), out_type=int)
            return np.array(first + [i for part in rest for i in [*self._space_symbol, *part]], np.int32)
        return np.array(self._processor.encode(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i < self.n_pieces])

    def _piece_bytes(self, i: int) -> int:
        if self._processor.is_control(i) or self._processor.is_unknown(i):
            return 0
        if self._processor.is_byte(i):
            return 1
        return len(self._processor.id_to_piece(i).replace(SPACE_SYMBOL, " ").encode())

    def _space_symbol_ids(self) -> list[int] | None:
        """The byte pieces of SPACE_SYMBOL; None if the model has none or puts a space before each text."""
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        adds_space = self._processor.encode("a", out_type=str)[0].startswith(SPACE_SYMBOL)
        return None if adds_space or not all(map(self._processor.is_byte, ids)) else ids


def train_sentencepiece(corpus: Iterable[str], vocab_size: int) -> bytes:
    """The model file of a lossless byte-pair encoding of `corpus`. The same text gives the same file."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            # Lossless: characters outside the alphabet become bytes, and white space stays.
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
