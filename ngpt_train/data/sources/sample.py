"""A sample of the text that a tokenizer is trained from."""

from __future__ import annotations

from collections.abc import Callable

from ngpt_train.data.sources.source import Source
from ngpt_train.data.sources.text import Counts, halves, place_of

# Text that a SentencePiece model is trained from at most: more changes few pieces and takes long.
SAMPLE_CHARACTERS = 32_000_000
SAMPLE_PIECE = 16_384


def draw_sample(source: Source, val_fraction: float, progress: Callable[[int, int], None]) -> tuple[list[str], Counts]:
    """Pieces of the training documents, or of the training part of a single one, and what was counted.

    Reads all text once. progress: told of documents and bytes. Raises DataError where text cannot be read.
    """
    sample = Sample(SAMPLE_CHARACTERS)
    counts = Counts()
    only = ""
    for text in source.documents():
        if not text:
            counts.empty += 1
            continue
        data = text.encode()
        place = place_of(data)
        counts.add(Counts(1, len(data), 0, int(place < val_fraction), place, place))
        progress(1, len(data))
        only = text if counts.documents == 1 else ""
        if place >= val_fraction:
            sample.add(text, place)
    if only:
        sample = Sample(SAMPLE_CHARACTERS)
        sample.add(halves(only, val_fraction)[0], 0.0)
    return sample.texts(), counts


class Sample:
    """A sample of the text within a number of characters, the same however often it is drawn."""

    def __init__(self, characters: int):
        self._characters = characters
        self._limit = 1.0
        self._pieces: list[tuple[float, str]] = []
        self._size = 0

    def add(self, text: str, place: float) -> None:
        for start in range(0, len(text), SAMPLE_PIECE):
            rank = place_of(f"{place} {start}".encode())
            if rank < self._limit:
                self._pieces.append((rank, text[start : start + SAMPLE_PIECE]))
                self._size += len(self._pieces[-1][1])
        while self._size > self._characters:
            self._limit /= 2
            self._pieces = [piece for piece in self._pieces if piece[0] < self._limit]
            self._size = sum(len(text) for _, text in self._pieces)

    def texts(self) -> list[str]:
        return [text for _, text in self._pieces]
