"""How many rows an epoch of the training text has."""

from __future__ import annotations

from ngpt_train.config.schema import Config
from ngpt_train.data.open import Dataset, Mixed
from ngpt_train.data.prepared.shards import Tokens
from ngpt_train.data.rows import rows_of


def epoch_rows(data: Dataset, config: Config) -> dict[str, float | None]:
    """Training rows of an epoch of each source of a mixture; of other text under the name "".

    Exact for prepared text, None for streamed text, which nobody has counted.
    """
    if isinstance(data.train, Mixed):
        sources = zip(data.train.mixture.names, data.train.sources, strict=True)
        return {name: epoch_rows(source, config)[""] for name, source in sources}
    return {"": float(len(rows_of(data.train, config))) if isinstance(data.train, Tokens) else None}
