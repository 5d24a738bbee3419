"""Data sets in other formats than parquet and jsonl, as the datasets library reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.data.hashes import canonical_hash
from ngpt_train.data.sources.readers import checked_text
from ngpt_train.data.streamed.shard_cache import FetchError, Shard


@dataclass(frozen=True)
class DatasetsText:
    """One split of a data set of the hub, or of a directory, as one shard. Travels to worker processes."""

    repo: str
    revision: str | None
    split: str
    text_field: str

    @property
    def shard(self) -> Shard:
        return Shard(f"{self.repo} ({self.split})", canonical_hash([self.repo, self.revision, self.split]), ())

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        """The split's rows, in order, as they arrive. Raises FetchError or DataError."""
        where = f"data.repo={self.repo}"
        number = 0
        rows = iter(self._open(where))

        def place() -> str:
            return f"{where}, {self.split}, row {number}"

        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # the library passes on what any of its readers raises
                raise _unreadable(f"{place()} or the next", error) from error
            if row is None:
                return
            number += 1
            if self.text_field not in row:
                listed = ", ".join(map(repr, row)) or "none"
                raise DataError(
                    f"{where}: no column {self.text_field!r} (there are: {listed}); "
                    "set data.text_field to the column that holds the text"
                )
            yield checked_text(row[self.text_field], place, self.text_field)

    def _open(self, where: str) -> Any:
        import datasets

        try:
            return datasets.load_dataset(self.repo, revision=self.revision, split=self.split, streaming=True)
        except Exception as error:
            raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> DataError:
    kind = FetchError if isinstance(error, (OSError, TimeoutError)) else DataError
    return kind(
        f"{where}: the datasets library cannot read it ({type(error).__name__}: {error}). Check data.repo, "
        "data.revision and data.split, or download the text and use data=local data.path=PATH"
    )
