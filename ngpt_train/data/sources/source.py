"""A source of text: its shards of documents, the choice of held-out documents, and the sample for a tokenizer."""

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from ngpt_train.core.errors import DataError
from ngpt_train.data.cache_files import FileHashes

# Parquet compresses its own pages.
EXTENSIONS = (".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".tsv", ".parquet")
# Size of compressed text over the size of the text, roughly.
COMPRESSED = 1 / 3
# Most characters of a sample: more text takes long and changes few pieces.
SAMPLE_CHARACTERS = 32_000_000
SAMPLE_PIECE = 16_384
# Fewest shards of a sample, so that one shard does not speak for all.
SAMPLE_SHARDS = 4


def extension(path: Path) -> str:
    """The ending among EXTENSIONS, such as `.jsonl.gz`; empty if there is none."""
    name = path.name.lower()
    return max((ending for ending in EXTENSIONS if name.endswith(ending)), key=len, default="")


def text_size(path: Path, n_bytes: int) -> int:
    """Roughly the bytes of text in a file of `n_bytes`, from its name alone."""
    return round(n_bytes / (1 if path.suffix.lower() in (".txt", ".jsonl", ".py") else COMPRESSED))


class FetchError(DataError):
    """A shard cannot be reached. Its content may be good."""


@dataclass(frozen=True)
class Shard:
    """A part of a text that is read as a whole: a file, several small files, or a part of a large file."""

    name: str
    identity: str  # changes with the content
    files: tuple[str, ...]
    part: tuple[int, int] | None = None  # [start, end): row groups (parquet), lines by first byte (jsonl)
    held_out: bool = False  # True if all documents validate
    size: int = 0  # roughly bytes of text, 0 if unknown
    checksums: tuple[str, ...] = ()  # sha256 of files that may change


class ShardSource(Protocol):
    """Reads the documents of shards. Travels to worker processes."""

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        """The documents of a shard in order. scratch: a directory for fetched files. Raises FetchError if the shard
        cannot be reached, DataError if it is faulty."""
        ...


@dataclass(frozen=True)
class Source:
    """Text in a fixed order: files of this machine, or shards from elsewhere with a known identity."""

    kind: str
    reader: ShardSource
    settings: dict[str, str]  # decide the documents together with the content
    files: list[Path] = field(default_factory=list)
    shards: tuple[Shard, ...] = ()
    revision: str | None = None  # commit of the hub
    val_files: list[Path] = field(default_factory=list)  # of this machine; among shards see `Shard.held_out`

    @property
    def names(self) -> list[str]:
        return [str(file) for file in [*self.files, *self.val_files]] or [shard.name for shard in self.shards]

    @property
    def validates_itself(self) -> bool:
        """True if a share of the documents validates, False if files of their own do."""
        return not self.val_files and not any(shard.held_out for shard in self.shards)

    @property
    def is_one_document(self) -> bool:
        """True if the file names alone show that the text is one document."""
        return len(self.files) == 1 and extension(self.files[0]).startswith(".txt")

    def content(self, hashes: FileHashes) -> list[list[str]]:
        """The identity of the text. For local files it is their bytes, not their place. Raises DataError if a file
        cannot be read."""
        if self.files:
            content = [[extension(file), hashes.sha256(file)] for file in self.files]
            return content + [["held out", extension(file), hashes.sha256(file)] for file in self.val_files]
        return [[shard.identity] for shard in self.shards]

    def documents(self) -> Iterator[str]:
        """All documents. Raises DataError if one cannot be read."""
        for shard in self.shards or [Shard(str(file), "", (str(file),)) for file in self.files]:
            yield from self.documents_of(shard)

    def documents_of(self, shard: Shard) -> Iterator[str]:
        """The documents of one shard. Raises DataError where one cannot be read."""
        with tempfile.TemporaryDirectory() as scratch:
            yield from self.reader.documents(shard, Path(scratch))


def place_of(text: bytes) -> float:
    """A document's place in [0, 1), from its text alone. Documents below data.val_fraction validate."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


def halves(text: str, val_fraction: float) -> tuple[str, str]:
    """The training and the validation part of a single document. The last `val_fraction` validates, from a line on."""
    cut = len(text) - max(1, round(val_fraction * len(text)))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return text[:cut], text[cut:]


@dataclass
class Counts:
    """Counts of documents."""

    documents: int = 0
    bytes: int = 0
    empty: int = 0
    validation: int = 0
    smallest: float = 1.0  # place (`place_of`)
    largest: float = 0.0

    def add(self, other: Self) -> None:
        self.documents += other.documents
        self.bytes += other.bytes
        self.empty += other.empty
        self.validation += other.validation
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)


def draw_sample(
    shards: Sequence[Shard],
    documents: Callable[[int], Iterable[str]],
    val_fraction: float,
    progress: Callable[[int, int], None] = lambda documents, n_bytes: None,
    share: float = 1.0,
) -> tuple[list[str], Counts | None]:
    """A sample of the training text, as pieces in the order of the text, and the counts if all text was read.

    The order of reading follows from the shards' content. At least SAMPLE_SHARDS shards are read, and more until they
    have `share` * SAMPLE_CHARACTERS of training text.
    documents: the documents of a shard, by its number. progress: is called with documents and bytes.
    Raises DataError if text cannot be read.
    """
    characters = round(share * SAMPLE_CHARACTERS)
    sample = Sample(characters)
    counts = Counts()
    only = ""
    seen = 0
    order = sorted(range(len(shards)), key=lambda number: place_of(shards[number].identity.encode()))
    for n_read, number in enumerate(order):
        if n_read >= SAMPLE_SHARDS and seen >= characters:
            return sample.texts(), None
        for text in documents(number):
            if not text:
                counts.empty += 1
                continue
            data = text.encode()
            place = place_of(data)
            counts.add(Counts(1, len(data), 0, int(place < val_fraction), place, place))
            progress(1, len(data))
            only = text if counts.documents == 1 else ""
            if place >= val_fraction:
                sample.add(text, place, number)
                seen += len(text)
    if only and val_fraction > 0:
        sample = Sample(characters)
        sample.add(halves(only, val_fraction)[0], 0.0)
    return sample.texts(), counts


def training_part(documents: Iterable[str], val_fraction: float) -> Iterator[str]:
    """The training documents, or the training part of a single document."""
    texts = filter(None, documents)
    beginning = list(itertools.islice(texts, 2))
    if len(beginning) == 1 and val_fraction > 0:
        yield halves(beginning[0], val_fraction)[0]
        return
    yield from (text for text in itertools.chain(beginning, texts) if place_of(text.encode()) >= val_fraction)


class Sample:
    """A sample of text with at most `characters` characters. The same text gives the same sample."""

    def __init__(self, characters: int):
        self._characters = characters
        self._limit = 1.0
        self._pieces: list[tuple[float, int, str]] = []
        self._size = 0

    def add(self, text: str, place: float, shard: int = 0) -> None:
        """Adds a document. The documents of a shard come in their order."""
        for start in range(0, len(text), SAMPLE_PIECE):
            rank = place_of(f"{place} {start}".encode())
            if rank < self._limit:
                self._pieces.append((rank, shard, text[start : start + SAMPLE_PIECE]))
                self._size += len(self._pieces[-1][2])
        while self._size > self._characters:
            self._limit /= 2
            self._pieces = [piece for piece in self._pieces if piece[0] < self._limit]
            self._size = sum(len(text) for _, _, text in self._pieces)

    def texts(self) -> list[str]:
        """The pieces in the order of the text."""
        return [text for _, _, text in sorted(self._pieces, key=lambda piece: piece[1])]
