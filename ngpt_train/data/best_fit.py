"""Packs documents into rows: best fit, the largest first."""

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Ids `start` to `start + size - 1` of a document, eos included, as targets of a row."""

    document: int
    start: int
    size: int


def best_fit(lengths: Sequence[int], context: int) -> list[list[Span]]:
    """Packs documents of `lengths` ids, eos included, into rows of at most `context` targets, each id once.

    The largest document comes first, and each goes into the row with the least sufficient room. A document longer than
    a row fills rows of its own. Its rest stands first in another row, because only there the id before it can be the
    first input. The eos of the document before opens any other document.
    """
    rows: list[list[Span]] = []
    rests: list[Span] = []
    whole: list[Span] = []
    for document, length in enumerate(lengths):
        cut = length // context * context
        rows += [[Span(document, start, context)] for start in range(0, cut, context)]
        if cut < length:
            (rests if cut else whole).append(Span(document, cut, length - cut))
    with_room: dict[int, list[int]] = {}  # with_room[room]: rows
    rooms = 0  # bit r is set if a row has room r

    def put(part: Span, row: int, room: int) -> None:
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
