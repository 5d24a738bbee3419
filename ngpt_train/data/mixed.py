"""Rows from several sources. A seeded hash of the row's number chooses the source.

Row j belongs to virtual stream j mod n_streams, as without a mixture. Every source has all streams, and row j is the
next row of stream j mod n_streams of its source. So a row depends on the earlier rows of its stream alone, and a rank
reads the same streams as without a mixture.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import SourceConfig, sources_of
from ngpt_train.core.errors import DataError
from ngpt_train.data.cache_files import canonical_hash
from ngpt_train.data.dataset import Dataset, OnMain, Tokens
from ngpt_train.data.loader import Reader, ReaderState, Share
from ngpt_train.data.permutation import uniform
from ngpt_train.data.rows import Batch, row_format, tokens_for_targets
from ngpt_train.data.streamed_text import corpus_of, list_shards, open_text
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Ints, Tokenizer, tokenizer_identity

logger = logging.getLogger(__name__)

BLOCK = 4096  # rows: their sources are looked up together


@dataclass(frozen=True)
class Mixture:
    """The sources and their shares of the rows. The shares add up to 1."""

    names: tuple[str, ...]
    shares: tuple[float, ...]
    seed: int

    def sources(self, rows: Ints) -> Ints:
        """The index of each row's source, (N,)."""
        bounds = np.cumsum(self.shares)[:-1]
        return np.searchsorted(bounds, uniform(rows, self.seed), side="right")


@dataclass(frozen=True)
class Mixed:
    """The training text of a mixture."""

    mixture: Mixture
    sources: tuple[Dataset, ...]


def turns(mixture: Mixture, share: Share, rows: int, taken: Ints) -> Iterator[tuple[int, int]]:
    """(source, number within the source) of each row of a rank, from row `rows` of the run on.

    Row n of stream s has the number n * n_streams + s within its source.
    taken[source, stream]: rows given so far, which this function counts on. It counts all rows of the rank's streams,
    including rows of other ranks.
    """
    n_streams = taken.shape[1]
    step = share.step(n_streams)
    first = share.next_row(rows, step)
    while True:
        block = first + step * np.arange(BLOCK)
        for row, source in zip(block.tolist(), mixture.sources(block).tolist(), strict=True):
            stream = row % n_streams
            number = int(taken[source, stream]) * n_streams + stream
            taken[source, stream] += 1
            if row % share.world_size == share.rank:
                yield source, number
        first += step * BLOCK


@dataclass(frozen=True)
class Turns:
    """The numbers of one source in `turns`. Travels to worker processes."""

    mixture: Mixture
    share: Share
    rows: int
    taken: Ints
    source: int

    def __iter__(self) -> Iterator[int]:
        for source, number in turns(self.mixture, self.share, self.rows, self.taken.copy()):
            if source == self.source:
                yield number


class MixtureReader(Reader):
    """This rank's rows of a mixture. rows, taken: see `turns`."""

    def __init__(self, mixture: Mixture, readers: Sequence[Reader], share: Share, rows: int, taken: Ints) -> None:
        self._mixture, self._readers = mixture, readers
        n_streams = taken.shape[1]
        owned = share.streams(n_streams)
        self._taken = np.full_like(taken, -1)
        self._taken[:, owned] = taken[:, owned]
        self._turns = turns(mixture, share, rows, self._taken)
        # Each earlier row counts on one rank, even if several ranks read its stream.
        self._own = taken[:, range(share.rank, n_streams, share.world_size)].sum(axis=1)

    def take(self, numbers: Ints) -> Batch:
        sources, within = np.array(list(islice(self._turns, len(numbers)))).T
        whole: list[Ints] = []
        for index, reader in enumerate(self._readers):
            (places,) = np.nonzero(sources == index)
            if not len(places):
                continue
            self._own[index] += len(places)
            parts = reader.take(within[places])
            whole = whole or [np.empty((len(numbers), part.shape[1]), np.int64) for part in parts]
            for filled, part in zip(whole, parts, strict=True):
                filled[places] = part
        return tuple(whole)

    def state(self) -> ReaderState:
        names = self._mixture.names
        cursors: dict[str, Ints] = {}
        skipped: dict[str, str] = {}
        for name, taken, reader in zip(names, self._taken, self._readers, strict=True):
            own = reader.state()
            cursors[f"{name}/rows"] = taken[:, None].copy()
            cursors |= {f"{name}/{part}": found for part, found in own.cursors.items()}
            skipped |= {f"{name}/{shard}": problem for shard, problem in own.skipped.items()}
        return ReaderState(cursors, skipped, dict(zip(names, self._own.tolist(), strict=True)))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def open_mixture(config: Config, tokenizer: Tokenizer | None, on_main: OnMain) -> Dataset:
    """Opens all sources with one tokenizer: the tokenizer of prepared shards, else the config's. A tokenizer without a
    file is trained on all sources."""
    from ngpt_train.data import open_dataset  # it imports this module

    sources = sources_of(config.data)
    opened: dict[str, Dataset] = {}
    if tokenizer is None and config.tokenizer.from_text and all(source.data.kind != "tokens" for source in sources):
        tokenizer = on_main(lambda: load_tokenizer(config.tokenizer, corpus=_mixed_corpus(config, sources)))
    for source in sorted(sources, key=lambda source: source.data.kind != "tokens"):
        try:
            data = open_dataset(replace(config, data=source.data), tokenizer, on_main)
        except DataError as error:
            raise DataError(f"data.mixture, source {source.name}: {error}") from error
        tokenizer = tokenizer or data.tokenizer
        if tokenizer_identity(data.tokenizer) != tokenizer_identity(tokenizer):
            raise DataError(
                f"data.mixture: {source.name} has the tokenizer {data.tokenizer.name} with eos {data.tokenizer.eos}, "
                f"another source {tokenizer.name} with eos {tokenizer.eos}. Prepare all of them with the same one"
            )
        opened[source.name] = data
    assert tokenizer is not None
    mixture = Mixture(tuple(s.name for s in sources), tuple(s.share for s in sources), config.run.seed)
    beginnings = [_beginning(opened[source.name].validation, config, source.share) for source in sources]
    path = Path("+".join(mixture.names))
    ids, offsets = zip(*beginnings, strict=True)
    validation = Tokens("validation", path, ids, tokenizer.eos, offsets)
    found = canonical_hash([mixture.names, mixture.shares, [opened[name].fingerprint for name in mixture.names]])
    described = {name: data.manifest["source"] for name, data in opened.items()}
    manifest = {"source": {"kind": "mixture", "sources": described}}
    mixed = Mixed(mixture, tuple(opened[name] for name in mixture.names))
    return Dataset(mixed, validation, tokenizer, found, path, manifest)


def _mixed_corpus(config: Config, sources: Sequence[SourceConfig]) -> Iterator[str]:
    """Training text for a tokenizer, in the sources' shares."""
    logger.info("training a SentencePiece model of %d pieces on all sources", config.tokenizer.vocab_size)
    for source in sources:
        own = replace(config, data=source.data)
        yield from corpus_of(open_text(own, list_shards(own))[1], source.share)


def _beginning(tokens: Tokens, config: Config, share: float) -> tuple[Ints, Ints]:
    """Ids and offsets of a split's first documents: enough for the share of eval.rows or eval.tokens, or all."""
    form = row_format(config, tokens.eos)
    lengths = tokens.documents[1]
    wanted = config.eval.rows or tokens_for_targets(config)
    assert wanted is not None
    if config.eval.rows is None:
        full = form.targets_of(lengths).cumsum()
    else:
        full = lengths.cumsum() // form.context if form.source_context is None else (lengths >= form.shortest).cumsum()
    ends = lengths[: int(np.searchsorted(full, max(1, round(share * wanted)))) + 1].cumsum()
    return tokens.ids(0, int(ends[-1])), np.append(0, ends)
