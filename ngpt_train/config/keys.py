"""What a key of the schema is made of."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Union

AUTO = "auto"

# Keys that exclude each other with a space between them, what is wrong with that, and what to do.
Conflict = tuple[str, str, str]

# OmegaConf resolves these aliases at run time, where `int | str` inside a container is not understood.
IntOrAuto = Union[int, str]
FloatOrAuto = Union[float, int, str]  # an int becomes a float when the config is built
BoolOrAuto = Union[bool, str]


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """A config key: `doc` is its sentence in `--help`, the rest are the limits of its value.

    `minimum`/`maximum` are inclusive, `above`/`below` exclusive. A string key with `choices` takes one
    of them; a number-or-string key takes a number within the limits or one of the choices.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def nearest_divisors(name: str, value: int, whole: int) -> str:
    """How to set key `name` near `value` so that it divides `whole`."""
    below = next(n for n in range(min(value, whole), 0, -1) if whole % n == 0)
    above = next((n for n in range(value + 1, min(whole, 8 * value) + 1) if whole % n == 0), None)
    return f"The nearest {name} that work: {below}" + (f" or {above}" if above else "")
