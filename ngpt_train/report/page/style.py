"""The style of an arm or a run: the same colour and marker on every figure and in every table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Chosen by search: under normal sight, deuteranopia, protanopia and tritanopia (Machado et al. 2009) any two are 20 or
# more apart in CIELAB, and each has a contrast of 3:1 on white and on the dark page. The first is the baseline's.
COLOURS = ("#5a6875", "#3c72be", "#e03909", "#10a879", "#d975b3", "#b3924b", "#753edd", "#b43140")
# A marker tells arms apart without colour, and where there are more arms than colours. A symbol has matplotlib's name,
# and a glyph beside the arm's name in a table.
SYMBOLS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "p": "⬟", "h": "⬢"}


@dataclass(frozen=True)
class Style:
    colour: str
    symbol: str
    glyph: str


def styles(arms: Iterable[str], baseline: str) -> dict[str, Style]:
    """The style of each arm or run, the baseline first, the others in their order."""
    in_order = [baseline, *(arm for arm in arms if arm != baseline)]
    symbols = list(SYMBOLS.items())
    return {arm: Style(COLOURS[k % len(COLOURS)], *symbols[k % len(symbols)]) for k, arm in enumerate(in_order)}
