"""Opens pairs of a text and its translation, with one vocabulary for both."""

import logging
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_json
from ngpt_train.data.cache_files import build_directory, cache_directory, canonical_hash
from ngpt_train.data.dataset import Dataset, Pairs, path_of
from ngpt_train.data.sources import documents_by_split
from ngpt_train.data.tokenizers import load_tokenizer, read_tokenizer, tokenizer_key, write_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def open_pairs(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """Both splits. Without a tokenizer or a file of one, a SentencePiece model is trained on both sides of the training
    text. Pairs that do not fit into a row, or have an empty side, are left out. With data.val_fraction=1 all others
    validate. Raises DataError for a faulty text, and for a split without pairs."""
    data, path = config.data, path_of(config)
    source, texts = documents_by_split(data)
    tokenizer = tokenizer or _tokenizer(config, texts["train"])
    splits = [_pairs(split, path, of_split, config, tokenizer) for split, of_split in texts.items()]
    found = canonical_hash([tokenizer.fingerprint, tokenizer.eos, config.model.context // 2, texts])
    return Dataset(
        splits[0], splits[1], tokenizer, found, path, {"source": {"kind": source.kind, "revision": source.revision}}
    )


def _tokenizer(config: Config, texts: list[list[str]]) -> Tokenizer:
    """The tokenizer of the config. One that is made from the text stays in the cache."""
    if not config.tokenizer.from_text:
        return load_tokenizer(config.tokenizer)
    key = canonical_hash([tokenizer_key(config.tokenizer), texts])
    directory = cache_directory(config) / "tokens" / f"pairs-{key[:16]}"

    def build(directory: Path) -> None:
        logger.info("making tokenizer=%s of both sides", config.tokenizer.kind)
        made = load_tokenizer(config.tokenizer, corpus=(side for pair in texts for side in pair))
        write_json(directory / "tokenizer.json", write_tokenizer(made, directory))

    build_directory(directory, build)
    return read_tokenizer(directory, read_json(directory / "tokenizer.json"))


def _pairs(split: str, path: Path, texts: list[list[str]], config: Config, tokenizer: Tokenizer) -> Pairs:
    sources, translations = [], []
    for pair in texts:
        source, translation = (tokenizer.encode(text) for text in pair)
        if len(source) and len(translation) and 1 + max(len(source), len(translation)) <= config.model.context // 2:
            sources.append(source)
            translations.append(translation)
    if not sources and (split == "validation" or config.data.val_fraction < 1):
        raise DataError(
            f"{path}: no pair of the {split} split fits into a row, whose halves have model.context / 2 = "
            f"{config.model.context // 2} tokens; raise model.context, name files with data.val_files, or add pairs"
        )
    if len(sources) < len(texts):
        left_out = f"{len(texts) - len(sources):,} of {len(texts):,} pairs"
        logger.info("%s of the %s split are left out: a side is empty or longer than half a row", left_out, split)
    return Pairs(split, path, tokenizer.eos, sources, translations, texts if split == "validation" else ())
