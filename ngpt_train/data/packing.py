"""Best-fit packing: documents side by side in rows, none cut that fits into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """Ids `start` to `start + size - 1` of a document, eos counted, as targets of a row."""

    document: int
    start: int
    size: int


def best_fit(lengths: Sequence[int], context: int) -> list[list[Part]]:
    """Rows of at most `context` targets that hold documents of `lengths` ids, eos counted, each id once.

    Largest first, each into the row that it leaves the least room in. A document longer than a row fills rows of its
    own; what is left of it stands first in another, where the id before it can stand: documents after the first
    are opened by the eos of the one before.
    """
    rows: list[list[Part]] = []
    rests: list[Part] = []
    whole: list[Part] = []
    for document, length in enumerate(lengths):
        cut = length // context * context
        rows += [[Part(document, start, context)] for start in range(0, cut, context)]
        if cut < length:
            (rests if cut else whole).append(Part(document, cut, length - cut))
    with_room: dict[int, list[int]] = {}  # rows by their free room
    rooms = 0  # bit r is set where a row has room r

    def put(part: Part, row: int, room: int) -> None:
        nonlocal rooms
        rows[row].append(part)
        if left := room - part.size:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left

    def new_row() -> int:
        rows.append([])
        return len(rows) - 1

    for part in rests:
        put(part, new_row(), context)
    for part in sorted(whole, key=lambda part: -part.size):
        fitting = rooms >> part.size
        if not fitting:
            put(part, new_row(), context)
            continue
        room = part.size + (fitting & -fitting).bit_length() - 1  # the smallest
        row = with_room[room].pop()
        if not with_room[room]:
            rooms ^= 1 << room
        put(part, row, room)
    return rows
