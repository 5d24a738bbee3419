"""A data set: the training text, the held-out text, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.hashes import canonical_hash
from ngpt_train.data.rows import rows_of
from ngpt_train.data.sources import open_source
from ngpt_train.data.token_sequence import Tokens
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer, with_eos

if TYPE_CHECKING:  # which make data sets
    from ngpt_train.data.mixed import Mixed
    from ngpt_train.data.streamed.streamed_text import StreamedText

OnMain = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Dataset:
    """Both splits. Equal token ids of equal tokenizers have equal fingerprints."""

    train: Tokens | StreamedText | Mixed
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    path: Path
    manifest: dict[str, Any]

    @property
    def commits(self) -> dict[str, str | None]:
        """The hub commit of each source, under the names of `config.sections.data.commits_of`."""
        source = self.manifest["source"]
        if source["kind"] != "mixture":
            return {"": source.get("revision")}
        return {name: part.get("revision") for name, part in source["sources"].items()}

    def with_rows(self, config: Config) -> Dataset:
        """Itself, for prepared text. Raises DataError if a split has no row."""
        for split in (self.train, self.validation):
            assert isinstance(split, Tokens)
            rows_of(split, config)
        return self


def path_of(config: Config) -> Path:
    """The place of the text, for messages."""
    return Path(config.data.path or config.data.repo or config.data.kind)


def check_whole(config: Config) -> None:
    """Raises ConfigError unless all of the text can be validation text (data.val_fraction=1)."""
    data = config.data
    if data.kind in ("tokens", "mixture") or data.val_files is not None:
        named, fix = f"data.kind={data.kind}", "Name the text with data=local data.path=FILE"
        if data.val_files is not None:
            named, fix = f"data.val_files={data.val_files}", "Set data.val_files=null, or leave data.val_fraction out"
        raise ConfigError(f"data.val_fraction=1, {named}: has a validation split of its own\n  {fix}")


def open_whole(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """All of the text as the validation split, tokenized in memory, which takes far less time than its evaluation.

    Raises DataError if the text cannot be read or is shorter than a row.
    """
    data, path, context = config.data, path_of(config), config.model.context
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    documents = [with_eos(tokenizer, text) for text in open_source(data).documents() if text or data.keep_empty]
    n_tokens = sum(map(len, documents))
    if n_tokens <= context and not config.model.source_length(context):
        raise DataError(
            f"{path}: has {n_tokens} tokens, less than one row (model.context + 1 = {context + 1}); add text, or "
            f"take documents of any length with evaluate.length.contexts=[{context}]"
        )
    validation = Tokens.of_documents("validation", path, documents, tokenizer.eos)
    ids = hashlib.sha256(b"".join(document.tobytes() for document in documents))
    found = canonical_hash([tokenizer.fingerprint, ids.hexdigest()])
    return Dataset(Tokens("train", path, [], tokenizer.eos), validation, tokenizer, found, path, {})
