"""What `open_dataset` returns: both splits of a text, and what identifies them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngpt_train.data.mixture import Mixture
from ngpt_train.data.prepared.shards import Tokens
from ngpt_train.data.streamed.workers import StreamedText
from ngpt_train.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Mixed:
    """The training text of several data sets."""

    mixture: Mixture
    sources: tuple[Dataset, ...]


@dataclass(frozen=True)
class Dataset:
    """Both splits, and what identifies them: the same token ids and tokenizer have the same fingerprint."""

    train: Tokens | StreamedText | Mixed
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    path: Path
    manifest: dict[str, Any]

    @property
    def commits(self) -> dict[str, str | None]:
        """Of data sets of the hub, as `config.mixture.commits_of` names them."""
        source = self.manifest["source"]
        if source["kind"] != "mixture":
            return {"": source.get("revision")}
        return {name: part.get("revision") for name, part in source["sources"].items()}
