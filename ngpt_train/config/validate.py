"""Checks groups and keys one by one: does the name exist, has the group the option, has the value the type and the
limits that its section states?"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import json
import operator
import sys
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ngpt_train.core.errors import ConfigError

if typing.TYPE_CHECKING:
    from ngpt_train.config.keys import Conflict, Table
    from ngpt_train.config.schema import Config

# OmegaConf's mark of a value that is not given yet: a key with it would count as unset.
_MISSING = "???"
# A maximum from here on only keeps out what nobody means; a message names it only where a value exceeds it.
_ABSURD = 1000


Options = Mapping[str, Sequence[str]]  # of each group


class Origin(typing.NamedTuple):
    """Where a key was set: `in FILE`, or empty for the command line. The larger `order` was applied later."""

    order: int = -1
    place: str = ""


@dataclasses.dataclass(frozen=True)
class Key:
    """A leaf of the schema: dotted name, the classes that a value may have, default, sentence, the name of its
    dataclass's field, and limits."""

    name: str
    types: tuple[type, ...]
    default: Any
    doc: str
    field: str
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    items: type = float  # of a list: int, float or str
    table: Table | None = None
    may_change: bool = False  # on a resume

    @property
    def is_free_text(self) -> bool:
        return str in self.types and self.choices is None  # number-or-auto keys have choices

    @property
    def is_table(self) -> bool:
        return self.table is not None

    def expected(self, value: Any = None) -> str:
        """The values that the key takes instead of `value`, in words: `an integer >= 1 or auto`."""
        limits = [
            f"{sign} {show(limit)}"
            for sign, _, limit in self._limits()
            if sign != "<=" or limit < _ABSURD or (type(value) in (int, float) and value > limit)
        ]
        bounds = f" {' and '.join(limits)}" if limits else ""
        words: dict[type, Sequence[str]] = {
            bool: ["true", "false"],
            int: [f"an integer{bounds}"],
            float: [f"a number{bounds}"],
            str: self.choices or ["text"],
            list: [self._expected_list(bounds)],
            dict: [f"a table such as {self.table.example}" if self.table else "a table"],
            type(None): ["null"],
        }
        return any_of(word for kind in self.types for word in words[kind])

    def _expected_list(self, bounds: str) -> str:
        if self.choices:
            return f"a list such as {show(self.default)}, of {', '.join(self.choices)}"
        examples = {int: ("integers", [1024, 2048]), float: ("numbers", [0.5, 1.0]), str: ("words", ["a", "b"])}
        kind, example = examples[self.items]
        return f"a list of {kind}{bounds} such as {show(self.default or example)}"

    def problem(self, value: Any) -> str | None:
        """The mistake in `value`, in words, or None."""
        text = f"must be {self.expected(value)}"
        if value == _MISSING:
            return f"{text}; {_MISSING} stands for no value"
        if isinstance(value, str) and "\0" in value:
            return f"{text}, without the character NUL"
        if self._takes(value):
            return None
        if self.table and isinstance(value, dict):
            return self.table.problem(value)
        if value == "":
            return f"empty, but {text}"
        if value is None and self.is_free_text:
            return f"{text}; leave it out for the default, or write 'null' with these quotes for the word"
        if type(value) in (int, float) and not _is_finite(value):
            return f"{text}; numbers must be finite"
        if isinstance(value, float) and int in self.types and value.is_integer():
            return f"{text}; write {int(value)}"
        if isinstance(value, str) and (bare := _unquoted(value)) is not value:
            # The quotes are the problem, unless the value is wrong without them too.
            return self.problem(bare) or f"{text}; write {show(bare)} without quotes"
        if isinstance(value, str) and self.choices:
            return text + did_you_mean(nearest(value, self.choices))
        if isinstance(value, list) and self.choices:
            wrong = next((str(item) for item in value if item not in self.choices), "")
            return f"{wrong or 'an empty list'} is none of them: {text}" + did_you_mean(nearest(wrong, self.choices))
        if self.is_free_text and isinstance(value, (bool, int, float)):
            return f"{text}; put it in quotes"
        return text

    def held(self, value: Any) -> Any:
        """A valid `value` as the configuration holds it: integers of a float's key are floats, a table is a copy."""
        if isinstance(value, list):
            return [self.items(x) for x in value]
        if isinstance(value, dict):
            return copy.deepcopy(value)
        return float(value) if float in self.types and type(value) is int else value

    def _takes(self, value: Any) -> bool:
        if value is None or isinstance(value, bool):
            return type(value) in self.types
        if isinstance(value, (int, float)):
            is_number = float in self.types or (int in self.types and isinstance(value, int))
            return is_number and _is_finite(value) and all(holds(value, limit) for _, holds, limit in self._limits())
        if isinstance(value, str):
            # Empty text is a forgotten value, unless it is the default.
            allowed = value in self.choices if self.choices else bool(value) or self.default == ""
            return str in self.types and allowed
        if isinstance(value, list):
            enough = bool(value) or not self.choices
            return list in self.types and enough and all(self._takes_item(x) for x in value)
        return self.table is not None and isinstance(value, dict) and self.table.problem(value) is None

    def _takes_item(self, item: Any) -> bool:
        if self.items is str:
            return isinstance(item, str) and bool(item) and (not self.choices or item in self.choices)
        is_number = _is_finite(item) and (self.items is float or type(item) is int)
        return is_number and all(holds(item, limit) for _, holds, limit in self._limits())

    def _limits(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        lower = ((">=", operator.ge, self.minimum), (">", operator.gt, self.above))
        upper = (("<=", operator.le, self.maximum), ("<", operator.lt, self.below))
        return [(sign, holds, limit) for sign, holds, limit in (*lower, *upper) if limit is not None]


def flatten(tree: Mapping[Any, Any], keys: Container[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each leaf; a known key is a leaf even where its value is a mapping."""
    for name, value in tree.items():
        name = f"{prefix}{name}"
        if isinstance(value, Mapping) and name not in keys:
            yield from flatten(value, keys, name + ".")
        else:
            yield name, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted names."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        branch = tree
        for section in sections:
            if not isinstance(branch.get(section), dict):
                branch[section] = {}
            branch = branch[section]
        branch[key] = value
    return tree


def check_leaf(name: str, value: Any, keys: Mapping[str, Key], place: str = "", written: str | None = None) -> None:
    """Raises ConfigError unless `name` is a key that takes `value`. `place` is `in FILE` for a value of a file;
    `written` is the value as the user typed it."""
    if name not in keys:
        raise unknown_key(name, show(value), keys, place=place)
    key = keys[name]
    problem = key.problem(value)
    if problem:
        lines = [f"{name}={show(value) if written is None else written}: {problem}", key.doc]
        if key.default not in (None, "") and not key.is_table:
            lines.append(f"For example {name}={show(key.default)}")
        raise mistake(*lines, place=place)


def check_leaves(values: Mapping[str, Any], keys: Mapping[str, Key], place: str = "") -> None:
    """Runs `check_leaf` on each value but interpolations, whose value is known only after composition."""
    for name, value in values.items():
        if name not in keys or not is_interpolation(value):
            check_leaf(name, value, keys, place)


def check_name(name: str, value: str, options: Options, keys: Mapping[str, Key], place: str = "") -> None:
    """Raises ConfigError unless `name` is a group that has the option `value`, or a key that can be set here."""
    if name in options:
        check_option(name, value, options[name], place)
    elif instead := [k.table.instead for k in keys.values() if k.table and f"{name}.".startswith(f"{k.name}.")]:
        raise mistake(f"{name}={value}: a table cannot be set here", *instead, place=place)
    elif name not in keys:
        raise unknown_key(name, value, keys, list(options), place)


def check_option(group: str, option: str, options: Sequence[str], place: str = "") -> None:
    """Raises ConfigError unless `group` has `option`."""
    if option in options:
        return
    if group == "parallel" and _is_tensor_or_context(option):
        raise mistake(f"parallel={option}: {_NO_TENSOR_OR_CONTEXT}", _INSTEAD, place=place)
    table, _, row = option.rpartition("/")
    rows, siblings = _below(option, options), _below(table, options)
    known = f"{group} has the options {', '.join(_folded(options))}"
    if group == "tasks":
        known += f"\n  Tasks themselves are a list: {group}=[{option}]"
    if "," in option or option.startswith(("[", "{")):
        problem = f"a group takes one option; to run several one after the other write -m {group}=a,b"
    elif rows:
        problem = f"several; choose one, for example {group}={option}/{rows[0]}"
        known = f"{option} has {', '.join(_folded(rows))}"
    elif siblings:
        problem = f"{table} has no {row}{did_you_mean(nearest(row, siblings))}"
        known = f"{table} has {', '.join(_folded(siblings))}"
    else:
        near = nearest(option, dict.fromkeys([*options, *_folded(options)]))
        problem = f"no such option{did_you_mean(near)}"
        if group == "model" and not near and option.isidentifier() and option != "null":
            known += f"\n  The folder of an architecture from outside is named each time: --plugin .../{option}"
    raise mistake(f"{group}={option}: {problem}", known, place=place)


def _below(table: str, options: Iterable[str]) -> list[str]:
    return [option.removeprefix(f"{table}/") for option in options if option.startswith(f"{table}/")]


def _folded(options: Iterable[str]) -> list[str]:
    """The options, those of one table as `table/...`."""
    return list(dict.fromkeys(f"{name.rpartition('/')[0]}/..." if "/" in name else name for name in options))


def is_interpolation(value: Any) -> bool:
    """Whether `value` is text such as ${scale.name}, which OmegaConf replaces after composition."""
    return isinstance(value, str) and "${" in value


_NO_TENSOR_OR_CONTEXT = "there is no tensor and no context parallelism here, the models fit GPUs without"
_INSTEAD = (
    "Use parallel=fsdp or hsdp; less memory still: train.activation_checkpointing=selective or full, and fewer "
    "train.micro_rows"
)


def _is_tensor_or_context(word: str) -> bool:
    """Whether a user who writes parallel=WORD or parallel.WORD=2 asks for tensor, sequence or context parallelism."""
    short = word.lower().replace("-", "_").removesuffix("_size").removesuffix("_parallel")
    return short in ("tp", "cp", "sp", "tensor", "context", "sequence", "ring")


def unknown_key(name: str, value: str, keys: Iterable[str], groups: Sequence[str] = (), place: str = "") -> ConfigError:
    """The error for a name that is none of `keys`; it says whether it is a section, or which key or group is near."""
    if name.startswith("parallel.") and _is_tensor_or_context(name.partition(".")[2]):
        return mistake(f"{name}={value}: {_NO_TENSOR_OR_CONTEXT}", _INSTEAD, place=place)
    members = [key for key in keys if key.startswith(name + ".")]
    if members:
        fix = "Set its keys: " + ", ".join(members)
        return mistake(f"{name}={value}: {name} is a section, not a key", fix, place=place)
    what, lists = ("key or group", "them all") if groups else ("key", "all keys")
    near = did_you_mean(similar_keys(name, [*groups, *keys]))
    return mistake(f"{name}={value}: no such {what}{near}", f"`ngpt-train train --help` lists {lists}", place=place)


def similar_keys(name: str, candidates: Iterable[str]) -> list[str]:
    """Names that `name` may have meant: spelt alike in its section (probe.checkpoint -> probe.checkpoints), with the
    same last part (lr -> optim.lr), with that part as a word of theirs (model.dropout -> model.residual_dropout), or
    spelt alike."""
    names = list(candidates)
    section, _, last = name.lower().rpartition(".")
    beside = nearest(name, [other for other in names if section and other.rpartition(".")[0] == section], cutoff=0.85)
    same_end = [other for other in names if other.rpartition(".")[2] == last]
    with_word = [other for other in names if last in other.rpartition(".")[2].split("_")]
    return list(dict.fromkeys([*beside, *same_end, *with_word, *nearest(name, names, cutoff=0.75)]))[:3]


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> list[str]:
    return difflib.get_close_matches(name.lower(), list(candidates), n=3, cutoff=cutoff)


def did_you_mean(names: list[str]) -> str:
    return f"; did you mean {any_of(names)}?" if names else ""


def any_of(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *head, last = names
    return f"{', '.join(head)} or {last}" if head else last


def mistake(*lines: str, place: str = "") -> ConfigError:
    """One message: what is wrong on the first line, what helps below it; `place` is where the key was set."""
    return ConfigError("\n  ".join([*lines, f"Set {place}"] if place else lines))


def report_together(config: Config, conflict: Conflict, origins: Mapping[str, Origin]) -> ConfigError:
    """The error for keys that exclude each other; it names the files that set them."""
    keys, problem, fix = conflict
    names = keys.split()
    values = {name: operator.attrgetter(name)(config) for name in names}
    lines = [f"{', '.join(f'{name}={show(value)}' for name, value in values.items())}: {problem}", fix]
    lines += [f"{name} is set {origins[name].place}" for name in names if name in origins and origins[name].place]
    return mistake(*lines)


def keep_later(config: Config, names: str, both: str, origins: Mapping[str, Origin]) -> None:
    """Sets the one of two keys that say the same thing to null, in place, that was set earlier. Raises ConfigError with
    the problem `both` where both were set in the same place."""
    values = [operator.attrgetter(name)(config) for name in names.split()]
    first, second = (origins[name].order for name in names.split())
    if None in values:
        return
    if first == second:
        raise report_together(config, (names, both, "Set one of them"), origins)
    section, _, key = names.split()[first > second].rpartition(".")
    setattr(operator.attrgetter(section)(config), key, None)


def show(value: Any) -> str:
    """`value` as it is written on the command line and in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(f"'{x}'" if _needs_quotes(x) else show(x) for x in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {show(x)}" for name, x in value.items()) + "}"
    return str(value)


def _needs_quotes(value: Any) -> bool:
    """True for a word of a list that would be something else, or several words, without quotes."""
    if not isinstance(value, str):
        return False
    is_word = value and value == value.strip() and not set(value) & set(",[]{}:~")
    return not is_word or not isinstance(_unquoted(value), str)


def _is_finite(value: Any) -> bool:
    """A number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _unquoted(text: str) -> Any:
    """The number, boolean, null or list that `text` would be without its quotes, in YAML too; else `text` itself."""
    readers: tuple[Callable[[str], Any], ...] = (int, lambda text: float(text.replace(".inf", "inf")), json.loads)
    for read in readers:
        with contextlib.suppress(ValueError, RecursionError):
            return read(text)
    return text
