"""The text that a SentencePiece model is trained from: the same for prepared and for streamed text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ngpt_train.data.sources.text import Counts, Shard, halves, place_of

# Text that a model is trained from at most: more changes few pieces and takes long.
SAMPLE_CHARACTERS = 32_000_000
SAMPLE_PIECE = 16_384
# Shards that a sample is drawn from at least, so that it does not speak for one of them alone.
SAMPLE_SHARDS = 4


def draw_sample(
    shards: Sequence[Shard],
    documents: Callable[[int], Iterable[str]],
    val_fraction: float,
    progress: Callable[[int, int], None] = lambda documents, n_bytes: None,
) -> tuple[list[str], Counts | None]:
    """Pieces of the training documents, or of the training part of a single one, in the order of the text.

    documents: those of a shard, by its number. Reads shards in an order that follows from their content, SAMPLE_SHARDS
    of them or more until they have SAMPLE_CHARACTERS of training text. progress: told of documents and bytes.
    Returns also what was counted, if that was all text. Raises DataError where text cannot be read.
    """
    sample = Sample(SAMPLE_CHARACTERS)
    counts = Counts()
    only = ""
    seen = 0
    order = sorted(range(len(shards)), key=lambda number: place_of(shards[number].identity.encode()))
    for n_read, number in enumerate(order):
        if n_read >= SAMPLE_SHARDS and seen >= SAMPLE_CHARACTERS:
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
    if only:
        sample = Sample(SAMPLE_CHARACTERS)
        sample.add(halves(only, val_fraction)[0], 0.0)
    return sample.texts(), counts


class Sample:
    """A sample of the text within a number of characters, the same however often it is drawn."""

    def __init__(self, characters: int):
        self._characters = characters
        self._limit = 1.0
        self._pieces: list[tuple[float, int, str]] = []
        self._size = 0

    def add(self, text: str, place: float, shard: int = 0) -> None:
        """A document, after those of its shard that stand before it."""
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
        """In the order of the text."""
        return [text for _, _, text in sorted(self._pieces, key=lambda piece: piece[1])]
