"""The YAML files: where they are, which options each group has, what they may say, and how they are read.

An experiment's file may be a table: `rows` names experiments that share the rest of the file, and
`experiment=<file>/<row>` chooses one. A row says what a command line would say, `model: gpt` or `optim.lr: 1.0e-3`;
what it says goes over the rest of the file, and the command line over both.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ngpt_train.config.architectures import all_keys, architectures, plugins
from ngpt_train.config.keys import AUTO
from ngpt_train.config.validate import (
    Key,
    Options,
    check_leaves,
    check_name,
    check_option,
    did_you_mean,
    flatten,
    mistake,
    nearest,
    nested,
    show,
)
from ngpt_train.core.errors import ConfigError
from ngpt_train.core.files import read_yaml_text

# In the order of configs/train.yaml, where a later group overrides an earlier one.
GROUPS = {
    "scale": "Size: fills model.*, the steps and the batch.",
    "recipe": "Optimizer, schedule and lr table; follows the model unless given.",
    "model": "Architecture.",
    "objective": "What the model learns; null is what the architecture is made for: the next token.",
    "task": "A task with labels and its fine-tuning, for the verb finetune.",
    "tokenizer": "Text to ids; follows the data unless given.",
    "data": "Where the text or the tokens come from.",
    "parallel": "How the processes of torchrun share the work.",
    "kernels": "Implementation of the fused operations.",
    "checkpoint": "What is saved and kept.",
    "eval": "Validation during training.",
    "tasks": "Tasks on which a model is evaluated: a list by its name; or the list itself, tasks=[arc_easy,piqa].",
    "logging": "What is written while training.",
    "hardware": "Micro rows, recomputation and layout for a card and a scale, on 64 ranks, 8 of a host.",
    "experiment": "A whole run: chooses options and sets keys; what it sets can be overridden.",
    "study": "A comparison of arms, for the verb study alone.",
}
# Options that are a key or two, without a file: parallel=fsdp is parallel.kind=fsdp.
BUILT_IN: dict[str, dict[str, Any]] = {
    **{f"parallel/{kind}": {"kind": kind} for kind in (AUTO, "ddp", "fsdp", "hsdp", "single")},
    **{f"kernels/{kind}": {"kind": kind} for kind in (AUTO, "torch", "triton")},
    # The schema's defaults: as values, they would override those of a user's scale or recipe.
    **{f"{group}/default": {} for group in ("checkpoint", "eval", "logging")},
}
NONE_OF = ("objective", "task", "tasks", "hardware", "experiment", "study")
# The file that lists the groups.
PRIMARY = "train"
# Not for users: the model's file names the schema of its architecture here.
SCHEMA_GROUP = "schema/model"
_HEADER = "# @package _global_"
# These fill several sections, so their keys are full names.
_GLOBAL_GROUPS = ("scale", "recipe", "objective", "task", "tasks", "hardware", "experiment")
# As part of a run's name.
_ROW_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")

Said = tuple[str, dict[str, Any]]  # a place, to be named in messages, and what is set there by full names


def config_dir() -> Path:
    """Directory of the packaged YAML files: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def list_experiments() -> list[str]:
    """Every name that `experiment=NAME` accepts without a directory of the user's own."""
    return Files().options["experiment"][:-1]


@dataclass(frozen=True)
class Option:
    """One option of a group: a YAML file, a row of a table of experiments, or a built-in one."""

    group: str
    name: str
    path: Path | None = None
    row: str = ""

    @property
    def place(self) -> str:
        return f"in {self.path}" if self.path else f"by {self.group}={self.name}"

    def tree(self) -> Mapping[Any, Any]:
        return read_mapping(self.path) if self.path else BUILT_IN[f"{self.group}/{self.name}"]

    def package(self) -> str | None:
        """The section that its first lines say it fills; None if they say nothing."""
        if self.row:
            return "_global_"
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path else []
        header = takewhile(re.compile(r"\s*(#+\s*@|$)").match, lines)
        return next((said[1] for line in header if (said := re.search(r"@package +(\S+)\s*$", line))), None)


class Row(NamedTuple):
    """A row of a table: options of groups, values of keys."""

    choices: dict[str, str]
    values: dict[str, Any]


class _Options(UserDict[str, list[str]]):
    """The options of each group, read when they are asked for: most command lines need no file of experiments."""

    def __init__(self, read: Callable[[str], list[str]]) -> None:
        super().__init__({group: [] for group in GROUPS})
        self._read = read

    def __getitem__(self, group: str) -> list[str]:
        super().__getitem__(group)  # KeyError
        return self._read(group)


class Files:
    """The YAML files: packaged ones, those of plug-ins, then those of `user_dir`. Of two files of one name the first
    counts. Raises ConfigError where `user_dir` is no directory of such files."""

    def __init__(self, user_dir: str | None = None) -> None:
        self.directories = [config_dir(), *(folder / "configs" for folder in plugins())]
        if user_dir is None:
            return
        user = Path(os.path.realpath(Path(user_dir).expanduser()))  # Path.resolve raises for a link to itself
        if not user.is_dir():
            raise mistake(f"--config-dir={user_dir}: no such directory", f"Looked for {user}")
        if not any((user / group).is_dir() for group in GROUPS):
            fix = "A file DIR/model/my.yaml, for example, is chosen with --config-dir=DIR model=my"
            raise mistake(f"--config-dir={user_dir}: holds no directory named like a group: {', '.join(GROUPS)}", fix)
        if user not in self.directories:
            self.directories.append(user)

    @cached_property
    def options(self) -> Mapping[str, list[str]]:
        """The options of each group; only those of NONE_OF can be none (`null`)."""
        return _Options(cache(self._options))

    def option(self, config_path: str) -> Option:
        """`group/option`, which exists."""
        group, _, name = config_path.partition("/")
        if config_path in BUILT_IN:
            return Option(group, name)
        if path := self._file(config_path):
            return Option(group, name, path)
        table, _, row = config_path.rpartition("/")
        return Option(group, name, self._file(table), row)

    def warn_shadowed(self) -> None:
        """Says on stderr which files are not used because one of an earlier directory has their name."""
        if os.environ.get("RANK", "0") != "0":
            return
        for directory in self.directories[1:]:
            inside = [path for group in GROUPS for path in (directory / group).rglob("*.yaml")]
            for path in sorted([*directory.glob("*.yaml"), *inside]):
                config_path = path.relative_to(directory).with_suffix("").as_posix()
                built_in = f"the built-in {config_path.replace('/', '=', 1)}" if config_path in BUILT_IN else None
                used = built_in or self._file(config_path)
                if used != path:
                    fix = "rename yours and choose it by its new name"
                    print(f"warning: {path} is not used: {used} has the same name; {fix}", file=sys.stderr)

    def defaults_lists(self, choices: Mapping[str, str]) -> dict[str, tuple[list[Any], str | None]]:
        """The defaults list and the section of train.yaml and of each `group/option` that a command line with `choices`
        may compose. Raises ConfigError for a mistake in one of these lists."""
        lists: dict[str, tuple[list[Any], str | None]] = {}

        def visit(config_path: str, chain: list[str]) -> None:
            option = self.option(config_path)
            defaults = self._defaults(option)
            lists[config_path] = defaults, option.package()
            for group, name in filter(None, [self._choice(entry, option) for entry in defaults]):
                below = f"{group}/{name}"
                if below in chain and config_path.startswith(f"{group}/"):
                    between = [f"{path.partition('/')[2]} -> " for path in chain[chain.index(below) :]]
                    problem = f"{group}={name}: builds upon itself: {''.join(between)}{name}"
                    raise mistake(problem, f"Take {name} out of the list", place=f"in the defaults of {option.path}")
                if below not in lists and group != SCHEMA_GROUP:
                    visit(below, [*chain, below])

        for config_path in [*(f"{group}/{name}" for group, name in choices.items() if name != "null"), PRIMARY]:
            if config_path not in lists:
                visit(config_path, [config_path])
        return lists

    def said(self, option: Option, package: str, keys: Mapping[str, Key]) -> list[Said]:
        """The keys that the option sets. A row of a table comes after the table's common part.
        Raises ConfigError for a key that is unknown or whose value is wrong. `package` is the section that the file
        fills, empty for the root."""
        if option.group in _GLOBAL_GROUPS and package:
            raise _without_header(option)
        place, section = option.place, f"{package}." if package else ""
        not_keys = ("defaults", "rows") if option.row else ("defaults",)
        tree = {name: x for name, x in option.tree().items() if name not in not_keys}
        if dotted := dict(_dotted(tree, keys, section)):
            # The section of the file may be written again: model.d_model in a file of model/.
            tree = nested({name.removeprefix(section).removeprefix(section): x for name, x in dotted.items()})
            fix = "Write " + ", ".join(f"{name}: {show(value)}" for name, value in tree.items())
            problem = f"{', '.join(x.removeprefix(section) for x in dotted)}: only the rows of a table have dotted keys"
            raise mistake(problem, fix, place=place)
        # A recipe leaves its architecture's starts to init_table by `auto`, which says nothing to another architecture.
        others = all_keys() if option.group == "recipe" else {}
        leaves = flatten(tree, keys, section)
        values = {x: value for x, value in leaves if x in keys or x not in others or value != AUTO}
        for name, value in values.items():
            bare = name.removeprefix(section)
            if name not in keys and bare in keys:
                fix = f"Write {bare.removeprefix(f'{option.group}.')}, or make '{_HEADER}' the first line of the file"
                raise mistake(f"{name}={show(value)}: no such key", fix, place=place)
            check_leaves({name: value}, keys, place)
        if not option.row:
            return [(place, values)]
        row_place, of_row = f"{place}, row {option.row}", self._row(option).values
        check_leaves(of_row, keys, row_place)
        assert option.path is not None
        # The usual name would be the same for all rows, and so would their directory.
        run_name = f"{option.path.stem}-{option.row}-${{scale.name}}-seed${{run.seed}}"
        return [("", {"run.name": run_name}), (place, values), (row_place, of_row)]

    def _options(self, group: str) -> list[str]:
        roots = [directory / group for directory in self.directories]
        files = {path.relative_to(root).with_suffix("").as_posix() for root in roots for path in root.rglob("*.yaml")}
        names = sorted(files | {name.partition("/")[2] for name in BUILT_IN if name.startswith(f"{group}/")})
        if group == "experiment":
            names = self._experiments(names)
        return [*names, "null"] if group in NONE_OF else names

    def _experiments(self, files: Sequence[str]) -> list[str]:
        """The names of the experiments; in a table's place those of its rows, in the order of the file."""
        names: list[str] = []
        for name in files:
            path = self._file(f"experiment/{name}")
            # A name that is no file, such as a broken link, stays an option: who chooses it is told what is wrong.
            names += [f"{name}/{row}" for row in (_row_names(path) if path and path.is_file() else [])] or [name]
        return list(dict.fromkeys(names))

    def _row(self, option: Option) -> Row:
        return parse_row(option.tree()["rows"][option.row], self.options, f"{option.place}, row {option.row}")

    def _file(self, config_path: str) -> Path | None:
        paths = (directory / f"{config_path}.yaml" for directory in self.directories)
        return next((path for path in paths if path.exists() or path.is_symlink()), None)

    def _defaults(self, option: Option) -> list[Any]:
        """Its defaults list; a row's choices go over those of the table."""
        entries = option.tree().get("defaults", [])
        if not isinstance(entries, list):
            example = "For example\n    defaults:\n      - gpt"
            raise mistake(f"{option.path}: defaults={show(entries)}: not a list", example)
        if not option.row:
            return entries
        assert option.path is not None
        if _HEADER not in option.path.read_text().splitlines():
            raise _without_header(option)
        said = self._row(option).choices
        chosen = ((entry, self._choice(entry, option)) for entry in entries)
        kept = [entry for entry, choice in chosen if choice is None or choice[0] not in said]
        return [*kept, *({f"override /{group}": name} for group, name in said.items())]

    def _choice(self, entry: Any, of: Option) -> tuple[str, str] | None:
        """The (group, option) that an entry of a defaults list chooses, None if it chooses nothing."""
        place, own = f"in the defaults of {of.path}", of.group if of.group != PRIMARY else ""
        ((target, option),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else ((own, entry),)
        overriding = str(target).startswith("override ")
        target = str(target).removeprefix("override ").lstrip("/").partition("@")[0]
        if option in (None, "_self_") or not target:
            return None
        groups = [*self.options, SCHEMA_GROUP]
        if target not in groups:
            problem = f"{target}: no such group{did_you_mean(nearest(target, groups))}"
            raise mistake(problem, f"Groups: {', '.join(groups)}", place=place)
        names = [*architectures()] if target == SCHEMA_GROUP else self.options[target]
        check_option(target, str(option), names, place)
        if own not in (target, "") and not overriding:
            raise mistake(f"{target}={option}: already chosen", f"Write override /{target}: {option}", place=place)
        return target, str(option)


def _row_names(path: Path) -> list[str]:
    """The rows of an experiment's file, none if it is no table."""
    tree = read_mapping(path)
    if "rows" not in tree:
        return []
    rows = tree["rows"]
    if not isinstance(rows, dict) or not rows:
        example = "For example\n    rows:\n      small: {scale: debug, optim.lr: 1.0e-3}"
        raise mistake(f"{path}: rows={show(rows)}: not a mapping of names to rows", example)
    for name in rows:
        if not isinstance(name, str) or not _ROW_NAME.fullmatch(name):
            fix = "Letters, digits, '.', '_' and '-', not beginning with '.' or '-'; a number in quotes"
            raise mistake(f"{show(name)}: not a name for a row", fix, place=f"in {path}")
    return list(rows)


def _dotted(tree: Mapping[Any, Any], keys: Mapping[str, Key], section: str) -> Iterator[tuple[str, Any]]:
    """The leaves, by their full names, that `tree` sets with a dotted key at any depth."""
    for name, value in tree.items():
        if "." in str(name):
            yield from flatten({name: value}, keys, section)
        elif isinstance(value, Mapping) and f"{section}{name}" not in keys:
            yield from _dotted(value, keys, f"{section}{name}.")


def _without_header(option: Option) -> ConfigError:
    fix = f"Files of {option.group}/ need it: their keys are full names"
    return mistake(f"{option.path}: the first line is not '{_HEADER}'", fix)


def parse_row(row: Any, options: Options, place: str) -> Row:
    """What a row says. Raises ConfigError for a name that is neither group nor key; the values are not yet checked."""
    if not isinstance(row, Mapping):
        fix = "For example {model: gpt, optim.lr: 1.0e-3}; a row that sets nothing is {}"
        raise mistake(f"{show(row)}: a row is a mapping of groups to options and keys to values", fix, place=place)
    said, keys = Row({}, {}), all_keys()
    groups = {group: options[group] for group in options if group not in ("experiment", "study")}
    for name, value in row.items():
        name = str(name)
        if isinstance(value, Mapping) and name not in keys:
            fix = ", ".join(f"{key}: {show(inner)}" for key, inner in flatten({name: value}, keys))
            problem = f"{name}={show(value)}: a section, but a row has full keys"
            raise mistake(problem, f"Write {fix}" if fix else "Leave it out", place=place)
        check_name(name, show(value), groups, keys, place)
        if name in groups:
            said.choices[name] = show(value)
        else:
            said.values[name] = value
    return said


def read_mapping(path: Path) -> Mapping[Any, Any]:
    """The content of a YAML file, interpolations unresolved; not to be changed. Raises ConfigError."""
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        status = path.stat()
        tree = _parsed(path, status.st_mtime_ns, status.st_size)
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (YAMLError, ValueError) as error:  # a number of thousands of digits is a ValueError, as is broken UTF-8
        raise ConfigError(f"{path}: cannot be read as YAML in UTF-8: {error}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    except OSError as error:
        link = "" if path.exists() or not path.is_symlink() else f"it links to {path.readlink()}: "
        raise ConfigError(f"{path}: cannot be read: {link}{error.strerror or error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a list, but a config file is a mapping of keys to values")
    return tree


@cache
def _parsed(path: Path, modified: int, size: int) -> Any:
    return parse(read_yaml_text(path))


def parse(text: str) -> Any:
    """The content of YAML text; 1.0e6 is a number here. Raises YAMLError, OmegaConfBaseException."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
