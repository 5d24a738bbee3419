"""The command line: `group=option` and `key=value` arguments, and the sweeps of multirun."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ngpt_train.config.architectures import all_keys
from ngpt_train.config.validate import Key, Options, check_name, mistake, show, unknown_key

_SPACES = (" ", "\t", "\n")
_MOST_CHARACTERS = 4096  # of a number, word or list; Hydra's grammar reads a few thousand in a second


@dataclass
class Overrides:
    """The command line: options of groups, values of keys, and these values as they were typed."""

    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)


def parse(arguments: Iterable[str], options: Options) -> Overrides:
    """Splits and types the arguments.

    Raises ConfigError for anything but `group=option` with a known option and `key=value` with a known key, and for a
    group or key that is given two different values. The values are not yet checked: their limits belong to the
    architecture, which is known after composition.
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
        check_name(name, value, options, keys)
        if name in keys:
            value = _typed(keys[name], raw)
        said: dict[str, Any] = overrides.choices if name in options else overrides.values
        if name in said and said[name] != value:
            first = f"{name}={overrides.written[name]}"
            fix = f"Keep one, or run both with -m {first},{raw}"
            raise mistake(f"{name}={raw}: given twice, first as {first}", fix)
        said[name], overrides.written[name] = value, raw
    return overrides


def expand(arguments: Iterable[str]) -> list[list[str]]:
    """The jobs of a multirun: every combination of the values that `key=a,b`, `key=choice(a,b)` or
    `key=range(1,5)` list, the last argument varying fastest."""
    from hydra.core.override_parser.types import QuotedString, Transformer
    from hydra.errors import HydraException

    keys = all_keys()
    axes: list[list[str]] = []
    for argument in arguments:
        name = argument.partition("=")[0].strip()
        override = _parsed(argument)  # None: parse() says what is wrong, or takes it as text
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


def _split(argument: str, groups: Options) -> tuple[str, str]:
    name, equals, raw = argument.partition("=")
    name = name.strip()
    # The options of this group are lists: tasks=[a,b] is eval.tasks=[a,b], and eval.tasks=NAME is tasks=NAME.
    if name == "tasks" and raw.strip().startswith("["):
        name = "eval.tasks"
    elif name == "eval.tasks" and raw in groups["tasks"]:
        name = "tasks"
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


def _typed(key: Key, raw: str) -> Any:
    """The value that `raw` stands for. Free text is taken as it is, so that a prompt may hold any character;
    all else is read by Hydra's grammar, and what that cannot read stays text for check_leaf to refuse."""
    if key.is_free_text:
        if raw.lower() == "null":
            return None
        quoted = len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"" and raw[0] not in raw[1:-1]
        return raw[1:-1] if quoted else raw
    if len(raw) > _MOST_CHARACTERS:
        raise mistake(f"{key.name}={raw[:40]}...: {len(raw):,} characters", f"{key.name} must be {key.expected()}")
    if (override := _parsed(f"{key.name}={raw}")) is None:
        return raw
    if override.is_sweep_override():
        problem = f"{key.name}={raw}: several values, but {key.name} takes one: {key.expected()}"
        raise mistake(problem, f"To run them one after the other add -m; a list is written {key.name}=[a,b]")
    value = override.value()
    return [value] if list in key.types and value in (key.choices or ()) else value


@lru_cache(maxsize=4096)  # a study composes the same words hundreds of times, and Hydra takes a millisecond for each
def _parsed(argument: str) -> Any:
    """Hydra's reading of `key=value`; None if its grammar cannot read it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(argument)
    except (HydraException, ValueError):  # a number of thousands of digits is a ValueError
        return None
