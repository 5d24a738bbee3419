"""The parts of a key: default, help, limits, choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict, Union, Unpack

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

AUTO = "auto"
TABLES = frozenset({"optim.lr_table", "model.init_table"})  # keys whose value is a mapping, by dotted name

# The names of keys that exclude each other, with spaces between them; what is wrong; what to do.
Conflict = tuple[str, str, str]

# A key of such a type takes a number or a switch, or `auto`, or in its place the words that its `choices` name.
# OmegaConf resolves these aliases at run time, where `int | str` inside a container is not understood.
IntOrAuto = Union[int, str]
FloatOrAuto = Union[float, int, str]  # an int becomes a float when the config is built
BoolOrAuto = Union[bool, str]


class Limits(TypedDict, total=False):
    """The values that a key takes. `minimum`/`maximum` are inclusive, `above`/`below` exclusive. A string key with
    `choices` takes one of them; a number-or-string key takes a number within the limits or one of the choices; a key
    for a list of words takes one or more of them, on the command line a single one without brackets too."""

    choices: tuple[str, ...]
    minimum: float
    above: float
    maximum: float
    below: float


class Table(NamedTuple):
    """A key whose value is a mapping. problem: says what is wrong with a mapping, or None."""

    problem: Callable[[Mapping[Any, Any]], str | None]
    example: str
    instead: str  # what to do where somebody sets it on the command line


# Limits that several keys share. Their maxima keep out what nobody means.
COUNT = Limits(minimum=1, maximum=1_000_000_000)
COUNT_OR_0 = Limits(minimum=0, maximum=1_000_000_000)
ROWS = Limits(minimum=1, maximum=10_000_000)
SECONDS = Limits(above=0, maximum=10_000_000)
BEAMS = Limits(minimum=1, maximum=1000)
SEED = Limits(minimum=0, maximum=2**63 - 1)


def key(default: Any, doc: str, named: str | None = None, table: Table | None = None, **limits: Unpack[Limits]) -> Any:
    """A config key: `doc` is its sentence in `--help`, the rest are the limits of its value. named: its name, where
    that is a word of Python's, which no field can have. table: of a key that takes a mapping. Raises ValueError for an
    empty sentence."""
    if not doc.strip():
        raise ValueError("a key without a sentence")
    metadata = {"doc": doc, "named": named, "table": table, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def name_of(field: Field[Any]) -> str:
    """The name of the key that a field of the schema holds."""
    return field.metadata.get("named") or field.name


class VerbKeys:
    """The keys of a verb."""

    verb: ClassVar[str]
    may_change: ClassVar = True

    def refused(self, config: Config) -> Iterator[Conflict]:
        """Keys that the verb lacks, and keys that exclude each other."""
        yield from ()


def nearest_divisors(name: str, value: int, whole: int, unit: int = 1) -> str:
    """How to set key `name` near `value` so that it divides `whole` and is a multiple of `unit`; "" if nothing does."""
    below = next((n for n in range(min(value, whole) // unit * unit, 0, -unit) if whole % n == 0), None)
    first_above = value // unit * unit + unit
    above = next((n for n in range(first_above, min(whole, 8 * value) + 1, unit) if whole % n == 0), None)
    found = " or ".join(str(n) for n in (below, above) if n)
    return f"The nearest {name} that work: {found}" if found else ""


def nearest_multiples(name: str, value: int, unit: int) -> str:
    """How to set key `name` near `value` so that `unit` divides it."""
    below = value // unit * unit
    return f"The nearest {name} that work: {f'{below} or ' if below else ''}{below + unit}"
