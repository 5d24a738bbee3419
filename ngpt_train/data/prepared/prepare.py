"""Where the token shards of a text lie, and what identifies them; preparation.py writes them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data.dataset import FORMAT, MANIFEST, cache_directory, read_manifest
from ngpt_train.data.directory import build_directory, is_filled
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.prepared.preparation import RECIPE, Preparation, sha256_of
from ngpt_train.data.sources.source import Source, open_source
from ngpt_train.data.tokenizers import Tokenizer, tokenizer_key

logger = logging.getLogger(__name__)


def prepare_shards(
    config: Config, hashes: FileHashes, out: Path | None = None, tokenizer: Tokenizer | None = None
) -> Path:
    """The directory of token shards for the text of `config`: `out`, or one in the cache that the content names.

    tokenizer: to use in place of the one that `config.tokenizer` describes. Writes the shards unless they are
    there already. What a failure or a kill leaves is in a hidden directory beside it, and the next call goes on from
    there. Raises DataError for faulty text, and if `out` holds anything else.
    """
    source = open_source(config.data)

    def place(tokenizer_key: list[Any]) -> tuple[Callable[[], str], Path]:
        compute_key = partial(_key, config, source, tokenizer_key, hashes)
        return compute_key, out or cache_directory(config) / "tokens" / f"{source.kind}-{compute_key()[:16]}"

    if tokenizer is None:
        compute_key, directory = place(tokenizer_key(config.tokenizer))
    else:
        # The text that a tokenizer was trained from lies there under the settings of the training.
        compute_key, directory = place([tokenizer.kind, "trained", tokenizer.vocab_size])
        if not is_filled(directory) or read_manifest(directory)["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            of_a_file = [tokenizer.fingerprint] if tokenizer.kind in ("sentencepiece", "hf") else []
            compute_key, directory = place([tokenizer.kind, *of_a_file])
    key = compute_key()
    prepared_before = is_filled(directory)
    if not prepared_before:
        preparation = Preparation(config, source, compute_key, tokenizer, hashes)
        build_directory(directory, preparation.write, resumable=True)
    if not (directory / MANIFEST).exists() or read_manifest(directory).get("key") != key:
        raise DataError(
            f"{directory} holds something else than this text with this tokenizer and these settings, and is not "
            "overwritten; choose another data.out or delete it"
        )
    if prepared_before:
        logger.info("using the tokens prepared before in %s", directory)
    return directory


def _key(config: Config, source: Source, tokenizer_key: list[Any], hashes: FileHashes) -> str:
    """What decides the shards, as one hash: found without reading the text if no file has changed."""
    return canonical_hash(
        {
            "version": [FORMAT, RECIPE],
            "kind": source.kind,
            "settings": source.settings,
            "files": source.content(partial(sha256_of, hashes=hashes)),
            "tokenizer": tokenizer_key,
            "val_fraction": config.data.val_fraction,
            "shard_tokens": config.data.shard_tokens,
        }
    )
