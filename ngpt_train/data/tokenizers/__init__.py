"""Text to token ids and back.

A tokenizer is its kind and the bytes of its model file. So it can be written beside its tokens (`write_tokenizer`) and
read again on a machine without a network.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import TokenizerConfig
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_whole
from ngpt_train.data.tokenizers.gpt2 import GPT2Tokenizer, gpt2_ranks, parse_ranks
from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ngpt_train.data.tokenizers.model_files import PINNED, read_file
from ngpt_train.data.tokenizers.sentence_piece import SentencePieceTokenizer, train_sentencepiece
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, WordsTokenizer, count_words

# The model file beside tokens and in checkpoints, where `tokenizer.json` is the description.
MODEL_FILES = {
    "bytes": None,
    "sentencepiece": "tokenizer.model",
    "gpt2": "tokenizer.tiktoken",
    "hf": "tokenizer.hf.json",
    "words": "tokenizer.words.txt",
}
GPT2_VOCABULARY = 50257
MOST_IDS = 10_000_000  # the limit of model.vocab_size


def known_vocabulary(kind: str) -> int | None:
    """The vocabulary size of a kind with only one tokenizer; None for the other kinds."""
    sizes = {pinned.name: pinned.vocab_size for pinned in PINNED.values()}
    return (sizes | {"bytes": BytesTokenizer.vocab_size, "gpt2": GPT2_VOCABULARY}).get(kind)


def load_tokenizer(config: TokenizerConfig, corpus: Iterable[str] | None = None) -> Tokenizer:
    """The tokenizer of the config. corpus: training text, for a tokenizer without a file. Raises DataError if its file
    is not available or its vocabulary does not fit the corpus."""
    if config.kind == "bytes":
        return BytesTokenizer()
    if config.kind == "gpt2":
        return GPT2Tokenizer(gpt2_ranks(config.path))
    if config.kind in PINNED:
        pinned = PINNED[config.kind]
        model = pinned.read(config.path)
        return SentencePieceTokenizer(model, f"tokenizer={config.kind}", config.kind, pinned.vocab_size)
    if config.path is not None:
        where = f"tokenizer.path={config.path}"
        if config.kind == "hf":
            return HuggingFaceTokenizer(read_file(config.path), config.eos, where)
        if config.kind == "words":
            return WordsTokenizer(read_file(config.path), where)
        return SentencePieceTokenizer(read_file(config.path), where)
    if corpus is None:
        raise DataError(
            f"tokenizer.path=null: there is no text here to make tokenizer={config.kind} from; choose the tokenizer "
            "that made these tokens: tokenizer=gpt2, tokenizer=bytes, or tokenizer=sentencepiece tokenizer.path=FILE"
        )
    if config.kind == "words":
        return WordsTokenizer(count_words(corpus, config.vocab_size), "the words of the text")
    return SentencePieceTokenizer(train_sentencepiece(corpus, config.vocab_size), "the trained model")


def tokenizer_key(config: TokenizerConfig) -> list[Any]:
    """The tokenizer settings that decide a text's tokens, as JSON. Raises DataError."""
    if config.kind in ("bytes", "gpt2"):  # kinds with one tokenizer
        return [config.kind]
    if config.kind in PINNED:
        return _pinned_key(config.kind, PINNED[config.kind].sha256)
    if config.path is None:
        return [config.kind, "trained", config.vocab_size]
    model = hashlib.sha256(read_file(config.path)).hexdigest()
    return [config.kind, model] if config.eos is None else [config.kind, model, config.eos]


def possible_keys(tokenizer: Tokenizer) -> list[list[Any]]:
    """The keys (`tokenizer_key`) of all configs with this tokenizer. Only the last key is of no other tokenizer."""
    if isinstance(tokenizer, HuggingFaceTokenizer):  # another eos with the same file is another tokenizer
        return [["hf", tokenizer.fingerprint], ["hf", tokenizer.fingerprint, tokenizer.eos_piece]]
    if isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.name in PINNED:
        return [_pinned_key(tokenizer.name, tokenizer.fingerprint)]
    if tokenizer.kind in ("sentencepiece", "words"):
        return [[tokenizer.kind, "trained", tokenizer.vocab_size], [tokenizer.kind, tokenizer.fingerprint]]
    return [[tokenizer.kind]]


def _pinned_key(kind: str, sha256: str) -> list[Any]:
    """T5's file without T5's sentinels is another tokenizer. The other files give the same ids under any name."""
    return ["sentencepiece", sha256, "t5"] if kind == "t5" else ["sentencepiece", sha256]


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> dict[str, Any]:
    """Writes the model file, if the kind has one, into `directory`. Returns the tokenizer's description as JSON."""
    file = MODEL_FILES[tokenizer.kind]
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
    """The tokenizer of `write_tokenizer` in `directory`. entry: its description. Raises DataError if its file is
    missing or has changed, or if the entry is damaged."""
    if not _is_entry(entry):
        described = repr(entry)[:200]
        raise DataError(f"{directory}: the tokenizer of these tokens is described by {described}, which is damaged")
    kind = entry["kind"]
    if kind == "bytes":
        return BytesTokenizer()
    path = directory / str(MODEL_FILES[kind])
    try:
        model = read_whole(path)
    except OSError as error:
        raise DataError(f"{path}: the tokenizer of these tokens cannot be read ({error.strerror})") from None
    if hashlib.sha256(model).hexdigest() != entry.get("fingerprint"):
        raise DataError(f"{path}: not the tokenizer that made these tokens (its checksum differs); copy it again")
    if kind == "gpt2":
        try:
            return GPT2Tokenizer(parse_ranks(model))
        except (ValueError, KeyError) as error:  # the file and its checksum are forged
            raise DataError(f"{path}: not GPT-2's vocabulary ({error})") from None
    if kind == "words":
        return WordsTokenizer(model, str(path))
    if kind == "hf":
        return HuggingFaceTokenizer(model, entry["eos"], str(path))
    return SentencePieceTokenizer(model, str(path), entry["name"], entry["vocab_size"])


def _is_entry(entry: Any) -> bool:
    """True if the entry has the form of a description by `write_tokenizer`. Does not read the file."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str) or entry["kind"] not in MODEL_FILES:
        return False
    if entry["kind"] == "bytes":  # has one tokenizer, whose other entries do not matter
        return True
    vocab_size, eos = entry.get("vocab_size"), entry.get("eos")
    sizes = type(vocab_size) is int and type(eos) is int and 0 <= eos < vocab_size <= MOST_IDS
    return sizes and isinstance(entry.get("name"), str)
