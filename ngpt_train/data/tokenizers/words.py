"""Words between white space, for texts that are tokenized already, such as Penn Treebank and WikiText-103."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.data.tokenizers.tokenizer import Ids

EOS, UNKNOWN = "<eos>", "<unk>"


class WordsTokenizer:
    """Every word is an id. <eos> ends every line and every document.

    So exp of the mean loss is the perplexity per word, line ends included, which papers on word-level language models
    report.
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

    Words are in the order of their frequency, equally frequent words in alphabetical order.
    """
    counts: Counter[str] = Counter()
    for text in corpus:
        counts.update(text.split())
    for special in (EOS, UNKNOWN):
        counts.pop(special, None)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    return "".join(f"{word}\n" for word in [EOS, UNKNOWN, *words[: vocab_size - 2]]).encode()
