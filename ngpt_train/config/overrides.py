"""The command line: `group=option` and `key=value` arguments, and the sweeps of multirun. A table's row says the same
in YAML."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ngpt_train.config.architectures import all_keys
from ngpt_train.config.validate import (
    INSTEAD,
    NO_TENSOR_OR_CONTEXT,
    Key,
    did_you_mean,
    flatten,
    is_tensor_or_context,
    mistake,
    nearest,
    show,
    unknown_key,
)

# A group whose options are lists of names, and the key that such a list fills: tasks=[a,b] is eval.tasks=[a,b], and
# eval.tasks=NAME is tasks=NAME.
_LISTS = {"tasks": "eval.tasks"}
_SPACES = (" ", "\t", "\n")
_MOST_CHARACTERS = 4096  # of a number, word or list; Hydra's grammar reads a few thousand in a second


@dataclass
class Overrides:
    """The command line: options of groups, values of keys, and these values as they were typed."""

    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)


def parse(arguments: Iterable[str], options: Mapping[str, Sequence[str]]) -> Overrides:
    """Splits and types the arguments; `options` are the options of each group.

    Raises ConfigError for anything but `group=option` with a known option and `key=value` with a known
    key, and for a group or key that is given two different values. The values are not yet checked: their
    limits belong to the architecture, which is known after composition.
    """
    overrides = Overrides()
    keys = all_keys()
    for argument in arguments:
        name, raw = _split(argument, options)
        takes_spaces = name in keys and keys[name].is_free_text
        if argument.partition("=")[0].endswith(_SPACES) or (raw.startswith(_SPACES) and not takes_spaces):
            fix = f"Write {name}={raw.strip()}, without spaces around the '='"
            raise mistake(f"{argument}: a space beside the '='", fix)
        value: Any = raw.strip() if name in options else raw
        _check_name(name, value, options)
        if name in keys:
            value = _typed(keys[name], raw)
        said: dict[str, Any] = overrides.choices if name in options else overrides.values
        if name in said and said[name] != value:
            first = f"{name}={overrides.written[name]}"
            fix = f"Keep one, or run both with -m {first},{raw}"
            raise mistake(f"{name}={raw}: given twice, first as {first}", fix)
        said[name], overrides.written[name] = value, raw
    return overrides


def parse_row(row: Any, options: Mapping[str, Sequence[str]], place: str) -> Overrides:
    """The same for a row of a table of experiments, whose values YAML has typed."""
    if not isinstance(row, Mapping):
        fix = "For example {model: gpt, optim.lr: 1.0e-3}; a row that sets nothing is {}"
        raise mistake(f"{show(row)}: a row is a mapping of groups to options and keys to values", fix, place=place)
    overrides, keys = Overrides(), all_keys()
    groups = {group: names for group, names in options.items() if group not in ("experiment", "study")}
    for name, value in row.items():
        name = str(name)
        if isinstance(value, Mapping) and name not in keys:
            fix = ", ".join(f"{key}: {show(inner)}" for key, inner in flatten({name: value}, keys))
            problem = f"{name}={show(value)}: a section, but a row has full keys"
            raise mistake(problem, f"Write {fix}" if fix else "Leave it out", place=place)
        _check_name(name, show(value), groups, place)
        if name in groups:
            overrides.choices[name] = show(value)
        else:
            overrides.values[name] = value
    return overrides


def expand(arguments: Iterable[str]) -> list[list[str]]:
    """The jobs of a multirun: every combination of the values that `key=a,b`, `key=choice(a,b)` or
    `key=range(1,5)` list, the last argument varying fastest."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString, Transformer
    from hydra.errors import HydraException

    parser, keys = OverridesParser.create(), all_keys()
    axes: list[list[str]] = []
    for argument in arguments:
        name = argument.partition("=")[0].strip()
        try:
            override = parser.parse_override(argument)
        except HydraException:
            override = None  # parse() says what is wrong, or takes it as text
        if override is None or not override.is_sweep_override():
            axes.append([argument])
            continue
        try:
            items = list(override.sweep_iterator())
        except HydraException:
            raise mistake(f"{argument}: this kind of sweep is not supported", f"List the values: {name}=a,b") from None
        if name in keys and not keys[name].is_free_text:
            values = [Transformer.str(item) for item in items]
        else:
            values = [item.text if isinstance(item, QuotedString) else show(item) for item in items]
        axes.append([f"{name}={value}" for value in values])
    return [list(job) for job in itertools.product(*axes)]


def check_option(group: str, option: str, options: Sequence[str], place: str = "") -> None:
    """Raises ConfigError unless `group` has `option`."""
    if option in options:
        return
    if group == "parallel" and is_tensor_or_context(option):
        raise mistake(f"parallel={option}: {NO_TENSOR_OR_CONTEXT}", INSTEAD, place=place)
    table, _, row = option.rpartition("/")
    rows, siblings = _below(option, options), _below(table, options)
    known = f"{group} has the options {', '.join(folded(options))}"
    if group in _LISTS:
        known += f"\n  Tasks themselves are a list: {group}=[{option}]"
    if "," in option or option.startswith(("[", "{")):
        problem = f"a group takes one option; to run several one after the other write -m {group}=a,b"
    elif rows:
        problem = f"several; choose one, for example {group}={option}/{rows[0]}"
        known = f"{option} has {', '.join(folded(rows))}"
    elif siblings:
        problem = f"{table} has no {row}{did_you_mean(nearest(row, siblings))}"
        known = f"{table} has {', '.join(folded(siblings))}"
    else:
        near = nearest(option, dict.fromkeys([*options, *folded(options)]))
        problem = f"no such option{did_you_mean(near)}"
        if group == "model" and not near and option.isidentifier() and option != "null":
            known += f"\n  The folder of an architecture from outside is named each time: --plugin .../{option}"
    raise mistake(f"{group}={option}: {problem}", known, place=place)


def _below(table: str, options: Iterable[str]) -> list[str]:
    return [option.removeprefix(f"{table}/") for option in options if option.startswith(f"{table}/")]


def folded(options: Iterable[str]) -> list[str]:
    """The options, those of one table as `table/...`."""
    return list(dict.fromkeys(f"{name.rpartition('/')[0]}/..." if "/" in name else name for name in options))


def _split(argument: str, groups: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    name, equals, raw = argument.partition("=")
    name = name.strip()
    if name in _LISTS and raw.strip().startswith("["):
        name = _LISTS[name]
    elif (group := next((g for g, k in _LISTS.items() if k == name), None)) and raw in groups.get(group, ()):
        name = group
    # Python hands on what a terminal sends in another encoding as halves of surrogate pairs.
    if any("\ud800" <= letter <= "\udfff" for letter in argument):
        raise mistake(f"{argument!a}: not UTF-8", "Set the terminal to UTF-8, or leave the broken bytes out")
    if argument.startswith("-"):
        fix = f"write {argument.lstrip('-')}" if equals else "overrides are KEY=VALUE, without dashes"
        options = "Options: --help, --cfg job, --config-dir DIR, --plugin DIR, -m"
        raise mistake(f"{argument}: no such option; {fix}", options)
    if argument.startswith(("+", "~")):
        bare, removing = name.lstrip("+~"), argument.startswith("~")
        if bare not in groups and bare not in all_keys():
            raise unknown_key(bare, raw or "VALUE", all_keys(), list(groups))
        why = "no key can be removed, but each can be set" if removing else "every key exists already"
        fix = argument.lstrip("+~") + ("" if equals else "=VALUE")
        raise mistake(f"{argument}: '{argument[0]}' is not understood: {why}", f"Write {fix}")
    if not equals:
        fix = f"{name}=OPTION with one of {', '.join(groups[name])}" if name in groups else f"{name}=VALUE"
        problem = f"{argument}: no '=' in this argument, which is neither GROUP=OPTION nor KEY=VALUE"
        raise mistake(problem, f"Write {fix}, without spaces around the '='")
    if not name:
        raise mistake(f"{argument}: nothing before the '='", f"Write KEY={raw.strip()}, without spaces around the '='")
    return name, raw


def _check_name(name: str, value: str, options: Mapping[str, Sequence[str]], place: str = "") -> None:
    """Raises ConfigError unless `name` is a group that has the option `value`, or a key that can be set here."""
    keys = all_keys()
    if name in options:
        check_option(name, value, options[name], place)
    elif instead := [k.table.instead for k in keys.values() if k.table and f"{name}.".startswith(f"{k.name}.")]:
        raise mistake(f"{name}={value}: a table cannot be set here", *instead, place=place)
    elif name not in keys:
        raise unknown_key(name, value, keys, list(options), place)


def _typed(key: Key, raw: str) -> Any:
    """The value that `raw` stands for. Free text is taken as it is, so that a prompt may hold any character;
    all else is read by Hydra's grammar, and what that cannot read stays text for check_leaf to refuse."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if key.is_free_text:
        if raw.lower() == "null":
            return None
        quoted = len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"" and raw[0] not in raw[1:-1]
        return raw[1:-1] if quoted else raw
    if len(raw) > _MOST_CHARACTERS:
        raise mistake(f"{key.name}={raw[:40]}...: {len(raw):,} characters", f"{key.name} must be {key.expected()}")
    try:
        override = OverridesParser.create().parse_override(f"{key.name}={raw}")
    except (HydraException, ValueError):  # a number of thousands of digits is a ValueError
        return raw
    if override.is_sweep_override():
        problem = f"{key.name}={raw}: several values, but {key.name} takes one: {key.expected()}"
        raise mistake(problem, f"To run them one after the other add -m; a list is written {key.name}=[a,b]")
    value = override.value()
    return [value] if list in key.types and value in (key.choices or ()) else value
