"""Numbers for a reader: rounded, with a true minus sign, and an interval in brackets."""

from __future__ import annotations

import math

DASH = "\N{EN DASH}"  # no value


def si(value: float | None, digits: int = 3) -> str:
    """8388608 -> 8.39M. A dash where there is no value."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    power = min(max(math.floor(math.log10(abs(value)) / 3), -4), 6) if abs(value) >= 1000 or abs(value) < 0.001 else 0
    scaled = float(f"{value / 1000.0**power:.{digits}g}")
    if abs(scaled) >= 1000 and power < 6:  # 999999 -> 1M, not 1000k
        power, scaled = power + 1, scaled / 1000
    return number(scaled, None, digits) + ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E")[power + 4]


def number(value: float | None, decimals: int | None = None, digits: int = 4) -> str:
    """`value` with `decimals` decimals, or with `digits` significant digits if `decimals` is None."""
    if value is None:
        return DASH
    text = f"{value:.{decimals}f}" if decimals is not None else f"{value:.{digits}g}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "\N{MINUS SIGN}")


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def interval(estimate: float | None, low: float | None, high: float | None) -> str:
    """`-0.041 (-0.050 to -0.032)`; a bound where one end is open."""
    if estimate is None and low is None and high is None:
        return DASH
    # Two significant digits of half the interval's width, three of an estimate without an interval.
    width = (high - low) / 2 if low is not None and high is not None else 0.0
    shown = width or abs(estimate or low or high or 0.0) / 10
    decimals = min(max(2, 1 - math.floor(math.log10(shown))), 6) if shown else 4
    middle, least, most = (None if x is None else number(x, decimals) for x in (estimate, low, high))
    ends = f"{least} to {most}" if least and most else f"at least {least}" if least else f"at most {most}"
    return f"{middle or ''} ({ends if least or most else 'no interval'})".strip()
