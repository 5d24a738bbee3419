"""The model file of SentencePiece: pieces, scores, kinds and normalisation.

The file is a protocol buffer. The package sentencepiece does not tell its normalisation, so the needed fields are read
here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BPE = 2  # TrainerSpec.model_type
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # SentencePiece.type; 4: the user's own, 5: not used
VARINT, EIGHT_BYTES, FOUR_BYTES = 0, 1, 5  # kinds of a field's value; else its length comes first


@dataclass
class SentencePieceFile:
    """Spelling and score of each piece by id, and the ids of each kind."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    normal: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    own_pieces: list[int] = field(default_factory=list)  # the user's own, and unused ones
    unknown: int | None = None
    kind: int = 1  # of model: Unigram
    byte_fallback: bool = False
    normalizes: bool = False  # replaces characters
    adds_space: bool = True  # before each text
    removes_spaces: bool = True  # repeated spaces, and spaces at the ends


def read_file(model: bytes) -> SentencePieceFile:
    """Reads a valid file: the package sentencepiece has loaded it before."""
    file = SentencePieceFile()
    for number, value in _fields(model):
        if number == 1:
            _add_piece(file, dict(_fields(value)))
        elif number == 2:
            trainer = dict(_fields(value))
            file.kind = trainer.get(3, file.kind)
            file.byte_fallback = bool(trainer.get(35, 0))
        elif number == 3:
            normalizer = dict(_fields(value))
            file.normalizes = bool(normalizer.get(2, b""))
            file.adds_space = bool(normalizer.get(3, 1))
            file.removes_spaces = bool(normalizer.get(4, 1))
    return file


def _add_piece(file: SentencePieceFile, entry: Mapping[int, Any]) -> None:
    number, kind = len(file.pieces), entry.get(3, NORMAL)
    file.pieces.append(entry[1].decode())
    file.scores.append(struct.unpack("<f", entry.get(2, bytes(4)))[0])
    if kind == NORMAL:
        file.normal.append(number)
    elif kind == UNKNOWN:
        file.unknown = number
    elif kind == CONTROL:
        file.control.append(number)
    elif kind != BYTE:
        file.own_pieces.append(number)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The number and the value of each field; the value is an int or bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(tag & 7)
        if size is None:
            size, at = _varint(message, at)
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer (seven bits a byte, the lowest first), and the position after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
