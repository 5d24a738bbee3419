"""The interface of a tokenizer, the encoding of documents of any length, and tokens that are bytes or words."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ngpt_train.core.errors import DataError

Ids = NDArray[np.integer]
Ints = NDArray[np.int64]

# Characters of a stretch. A longer document is encoded one stretch at a time: a tokenizer may need a hundred times its
# text in memory, and SentencePiece needs more time per character in a longer text.
STRETCH = 1 << 18
# Characters at the end of a stretch that are searched for a place to cut.
SEARCHED = 1 << 14
GUARD = "\n"
EOS, UNKNOWN = "<eos>", "<unk>"  # of words


class Tokenizer(Protocol):
    """Text to ids and back."""

    kind: str
    name: str
    vocab_size: int
    eos: int  # ends each document
    model: bytes  # content of the model file
    fingerprint: str  # its sha256
    n_bytes: Ints  # (vocab_size,) bytes of text of each id; 0 for special ids and the unknown piece

    def encode(self, text: str) -> Ids:
        """Ids `(n,)` of a text. Never special ids, even if the text spells one."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids below vocab_size, without special ids. Cut UTF-8 becomes U+FFFD."""
        ...


def tokenizer_identity(tokenizer: Tokenizer) -> list[Any]:
    """[fingerprint, eos]. Tokenizers with equal identities give equal ids. One file may be used with another eos."""
    return [tokenizer.fingerprint, tokenizer.eos]


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
    both = np.concatenate([tokenizer.encode("a"), tokenizer.encode("b")])
    guard = GUARD if tokenizer.decode(both.tolist()) != "ab" else ""
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


def pieces_of(tokenizer: Tokenizer) -> list[str]:
    """The text of each id, spaces included. Each is decoded after a letter, because at the beginning of a text some
    tokenizers leave the space out. A part of a longer character is U+FFFD; a special id has an empty text."""
    letter = tokenizer.encode("a").tolist()
    before = tokenizer.decode(letter)
    return [tokenizer.decode([*letter, i])[len(before) :] for i in range(tokenizer.vocab_size)]


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


class WordsTokenizer:
    """Every word between white space is an id. <eos> ends every line and every document.

    For texts that are tokenized already, such as Penn Treebank and WikiText-103: exp of the mean loss is the perplexity
    per word, line ends included, which papers on word-level language models report.
    model: a word a line, in the order of the ids, <eos> first. Other words are <unk>, and so is a spelled <eos>.
    """

    kind = "words"
    eos = 0

    def __init__(self, model: bytes, where: str):
        try:
            self._words = model.decode().removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            raise DataError(f"{where}: not UTF-8; a vocabulary of words is a text file with a word a line") from None
        self._ids = {word: i for i, word in enumerate(self._words)}
        faulty = next((word for word in self._words if word.split() != [word]), None)
        if faulty is not None or self._words[0] != EOS or UNKNOWN not in self._ids or len(self._ids) < len(self._words):
            raise DataError(
                f"{where}: not a vocabulary of words; that is a text file with a word a line, none of them twice, the "
                f"first {EOS}, another {UNKNOWN}"
            )
        del self._ids[EOS]
        self._unknown = self._ids[UNKNOWN]
        self.vocab_size = len(self._words)
        self.model = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.name = f"words-{self.vocab_size}-{self.fingerprint[:8]}"
        # The white space after a word counts with the word, so that a line has as many bytes as its words.
        self.n_bytes = np.array([len(word.encode()) + 1 for word in self._words], np.int64)
        self.n_bytes[[self.eos, self._unknown]] = 0

    def encode(self, text: str) -> Ids:
        """Words, with <eos> between lines. The <eos> of the last line is the eos of the document."""
        ids, of_word, unknown = array("i"), self._ids, self._unknown
        for number, line in enumerate(text.removesuffix("\n").split("\n")):
            if number:
                ids.append(self.eos)
            ids.extend(of_word.get(word, unknown) for word in line.split())
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Words with spaces between them. An <eos> begins a new line, but not at the end."""
        lines: list[list[str]] = [[]]
        for i in ids:
            if i == self.eos:
                lines.append([])
            else:
                lines[-1].append(self._words[i])
        return "\n".join(" ".join(words) for words in lines).removesuffix("\n")


def count_words(corpus: Iterable[str], vocab_size: int) -> bytes:
    """The model file of `WordsTokenizer` for a text: <eos>, <unk>, and the most frequent words, `vocab_size` at most.
    Words are in the order of their frequency, equally frequent words in alphabetical order."""
    counts: Counter[str] = Counter()
    for text in corpus:
        counts.update(text.split())
    for special in (EOS, UNKNOWN):
        counts.pop(special, None)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    return "".join(f"{word}\n" for word in [EOS, UNKNOWN, *words[: vocab_size - 2]]).encode()
