"""The YAML files: where they are, which options each group has, and what they may say.

An experiment's file may be a table: `rows` names experiments that share the rest of the file, and
`experiment=<file>/<row>` chooses one. A row says what a command line would say, `model: gpt` or `optim.lr: 1.0e-3`;
what it says goes over the rest of the file, and the command line over both.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.config.overrides import Overrides, check_option, parse_row
from ngpt_train.config.reading import read_mapping
from ngpt_train.config.validate import (
    Key,
    all_keys,
    architectures,
    check_leaf,
    did_you_mean,
    flatten,
    is_interpolation,
    nearest,
    report,
    show,
)
from ngpt_train.core.errors import ConfigError

# In the order of configs/train.yaml, where a later group overrides an earlier one.
GROUPS = {
    "scale": "Size: fills model.*, the steps and the batch.",
    "recipe": "Optimizer, schedule and lr table; follows the model unless given.",
    "model": "Architecture.",
    "tokenizer": "Text to ids; follows the data unless given.",
    "data": "Where the text or the tokens come from.",
    "parallel": "How the processes of torchrun share the work.",
    "kernels": "Implementation of the fused operations.",
    "checkpoint": "What is saved and kept.",
    "eval": "Validation during training.",
    "logging": "What is written while training.",
    "experiment": "A whole run: chooses options and sets keys; what it sets can be overridden.",
}
# The file that lists the groups.
PRIMARY = "train"
# Not for users: the model's file names the schema of its architecture here.
SCHEMA_GROUP = "schema/model"
_HEADER = "# @package _global_"
# These fill several sections, so their keys are full names.
_GLOBAL_GROUPS = ("scale", "recipe", "experiment")
# As part of a run's name.
_ROW_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def config_dir() -> Path:
    """Directory of the packaged YAML files: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def list_experiments() -> list[str]:
    """Every name that `experiment=NAME` accepts without a directory of the user's own."""
    return _experiments([config_dir()])


def search_path(user_dir: str | None) -> list[Path]:
    """Directories of YAML files, the packaged one first: of two files of one name the first counts."""
    if user_dir is None:
        return [config_dir()]
    user = Path(user_dir).expanduser().resolve()
    if not user.is_dir():
        raise ConfigError(f"--config-dir={user_dir}: no such directory\n  Looked for {user}")
    if not any((user / group).is_dir() for group in GROUPS):
        raise ConfigError(
            f"--config-dir={user_dir}: holds no directory named like a group: {', '.join(GROUPS)}"
            "\n  A file DIR/model/my.yaml, for example, is chosen with --config-dir=DIR model=my"
        )
    return [config_dir()] if user == config_dir() else [config_dir(), user]


def warn_shadowed(directories: Sequence[Path]) -> None:
    """Says on stderr which of the user's files are not used because a packaged file has their name."""
    packaged, *users = directories
    if os.environ.get("RANK", "0") != "0":
        return
    for user in users:
        for path in sorted(
            [*user.glob("*.yaml"), *(path for group in GROUPS for path in (user / group).rglob("*.yaml"))]
        ):
            if (packaged / path.relative_to(user)).is_file():
                print(
                    f"warning: {path} is not used: {packaged / path.relative_to(user)} has the same name;"
                    " rename yours and choose it by its new name",
                    file=sys.stderr,
                )


def group_options(directories: Sequence[Path]) -> dict[str, list[str]]:
    """The options of each group; only the experiment can be none (`null`)."""
    options = {group: _options(group, directories) for group in GROUPS}
    options["experiment"] = [*_experiments(directories), "null"]
    return options


def find(config_path: str, directories: Sequence[Path]) -> Path:
    """The file of `group/option`, which exists; for a row of a table the table's."""
    return _locate(config_path, directories)[0]


def check_defaults(
    choices: Mapping[str, str], options: Mapping[str, Sequence[str]], directories: Sequence[Path]
) -> list[str]:
    """Raises ConfigError for a mistake in the defaults list of train.yaml, of a chosen file, or of one that these
    name in turn. Returns `group/option` of all of them."""
    options = {**options, SCHEMA_GROUP: list(architectures())}
    reached: list[str] = []

    def visit(named: Iterable[tuple[str, str]], chain: list[str]) -> None:
        for group, option in named:
            config_path = f"{group}/{option}"
            if config_path in chain and chain[-1].startswith(f"{group}/"):
                between = [f"{path.partition('/')[2]} -> " for path in chain[chain.index(config_path) :]]
                problem = f"{group}={option}: builds upon itself: {''.join(between)}{option}"
                place = f"in the defaults of {find(chain[-1], directories)}"
                raise ConfigError(report([problem, f"Take {option} out of the list"], place))
            if config_path not in reached and group != SCHEMA_GROUP and option != "null":
                reached.append(config_path)
                visit(_chosen(config_path, options, directories), [*chain, config_path])

    visit([*choices.items(), *_chosen(PRIMARY, options, directories)], [])
    return reached


def row_nodes(
    config_paths: Sequence[str], options: Mapping[str, Sequence[str]], directories: Sequence[Path]
) -> dict[str, dict[str, Any]]:
    """For each of `config_paths` that is a row, what a file with this row alone would hold."""
    nodes = {}
    for config_path in config_paths:
        path, row = _locate(config_path, directories)
        if not row:
            continue
        if _HEADER not in path.read_text().splitlines():
            raise _without_header(path, "experiment")
        said = _parsed_row(path, row, options)
        chosen = ((entry, _choice(entry, "experiment", options, path)) for entry in _defaults(path))
        defaults = [entry for entry, choice in chosen if choice is None or choice[0] not in said.choices]
        defaults += [{f"override /{group}": option} for group, option in said.choices.items()]
        # The usual name would be the same for all rows, and so would their directory.
        name = f"{path.stem}-{row}-${{scale.name}}-seed${{run.seed}}"
        common = {key: value for key, value in read_mapping(path).items() if key not in ("defaults", "rows")}
        values = {"run.name": name, **dict(flatten(common, all_keys())), **said.values}
        nodes[config_path] = {"defaults": defaults, **_unflattened(values)}
    return nodes


def check_file(
    config_path: str,
    package: str,
    keys: Mapping[str, Key],
    options: Mapping[str, Sequence[str]],
    directories: Sequence[Path],
) -> list[tuple[str, list[str]]]:
    """What the file of `group/option` sets: the place, to be named in messages, and the keys, dotted and complete;
    for a row of a table first the common part of the table, then the row. Raises ConfigError for a key that is
    unknown or whose value is wrong. `package` is the section that the file fills, empty for the root."""
    path, row = _locate(config_path, directories)
    tree = read_mapping(path)
    tree.pop("defaults", None)
    place = f"in {path}"
    group = config_path.partition("/")[0]
    if group in _GLOBAL_GROUPS and package:
        raise _without_header(path, group)
    if row:
        del tree["rows"]
    section = f"{package}." if package else ""
    dotted = dict(_dotted(tree, keys, section))
    if dotted:
        # The section of the file may be written again: model.d_model in a file of model/.
        nested = _unflattened({name.removeprefix(section).removeprefix(section): x for name, x in dotted.items()})
        fix = "Write " + ", ".join(f"{name}: {show(value)}" for name, value in nested.items())
        problem = f"{', '.join(x.removeprefix(section) for x in dotted)}: only the rows of a table have dotted keys"
        raise ConfigError(report([problem, fix], place))
    names = []
    for name, value in flatten(tree, keys, section):
        bare = name.removeprefix(f"{package}.")
        if name not in keys and bare in keys:
            fix = f"Write {bare.removeprefix(f'{group}.')}, or make '{_HEADER}' the first line of the file"
            raise ConfigError(report([f"{name}={show(value)}: no such key", fix], place))
        if name not in keys or not is_interpolation(value):
            check_leaf(name, value, keys, place)
        names.append(name)
    if not row:
        return [(place, names)]
    values = _parsed_row(path, row, options).values
    for name, value in values.items():
        if name not in keys or not is_interpolation(value):
            check_leaf(name, value, keys, _row_place(path, row))
    return [(place, names), (_row_place(path, row), list(values))]


def _options(group: str, directories: Sequence[Path]) -> list[str]:
    paths = ((directory / group, path) for directory in directories for path in (directory / group).rglob("*.yaml"))
    return sorted({path.relative_to(root).with_suffix("").as_posix() for root, path in paths})


def _experiments(directories: Sequence[Path]) -> list[str]:
    """The names of the experiments; in a table's place those of its rows, in the order of the file."""
    names = []
    for option in _options("experiment", directories):
        path = find(f"experiment/{option}", directories)
        # What is no file, a broken link for example, is an option whose choice says so.
        names += [f"{option}/{row}" for row in (_row_names(path) if path.is_file() else [])] or [option]
    return list(dict.fromkeys(names))


def _row_names(path: Path) -> list[str]:
    """The rows of an experiment's file, none if it is no table."""
    tree = read_mapping(path)
    if "rows" not in tree:
        return []
    rows = tree["rows"]
    if not isinstance(rows, dict) or not rows:
        raise ConfigError(
            f"{path}: rows={show(rows)}: not a mapping of names to rows"
            "\n  For example\n    rows:\n      small: {scale: debug, optim.lr: 1.0e-3}"
        )
    for name in rows:
        if not isinstance(name, str) or not _ROW_NAME.fullmatch(name):
            fix = "Letters, digits, '.', '_' and '-', not beginning with '.' or '-'; a number in quotes"
            raise ConfigError(report([f"{show(name)}: not a name for a row", fix], f"in {path}"))
    return list(rows)


def _locate(config_path: str, directories: Sequence[Path]) -> tuple[Path, str]:
    """The file of `group/option`, which exists, and the row that is meant if the file is a table, else ''."""
    table, _, row = config_path.rpartition("/")
    names = ((config_path, ""), (table, row))
    files = ((directory / f"{name}.yaml", row) for name, row in names for directory in directories)
    return next((path, row) for path, row in files if path.exists() or path.is_symlink())


def _parsed_row(path: Path, row: str, options: Mapping[str, Sequence[str]]) -> Overrides:
    return parse_row(read_mapping(path)["rows"][row], options, _row_place(path, row))


def _row_place(path: Path, row: str) -> str:
    return f"in {path}, row {row}"


def _dotted(tree: Mapping[Any, Any], keys: Container[str], section: str) -> Iterator[tuple[str, Any]]:
    """The leaves, by their full names, that `tree` sets with a dotted key at any depth."""
    for name, value in tree.items():
        if "." in str(name):
            yield from flatten({name: value}, keys, section)
        elif isinstance(value, Mapping) and f"{section}{name}" not in keys:
            yield from _dotted(value, keys, f"{section}{name}.")


def _unflattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted names; what is no section although it is used as one is left to check_file."""
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


def _without_header(path: Path, group: str) -> ConfigError:
    return ConfigError(
        f"{path}: the first line is not '{_HEADER}'\n  Files of {group}/ need it: their keys are full names"
    )


def _chosen(
    config_path: str, options: Mapping[str, Sequence[str]], directories: Sequence[Path]
) -> list[tuple[str, str]]:
    """The (group, option) pairs that a file, or a row, chooses in its defaults list."""
    path, row = _locate(config_path, directories)
    group = config_path.partition("/")[0] if config_path != PRIMARY else ""
    chosen = list(filter(None, (_choice(entry, group, options, path) for entry in _defaults(path))))
    return chosen + (list(_parsed_row(path, row, options).choices.items()) if row else [])


def _defaults(path: Path) -> list[Any]:
    defaults = read_mapping(path).get("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults={show(defaults)}: not a list\n  For example\n    defaults:\n      - gpt")
    return defaults


def _choice(entry: Any, group: str, options: Mapping[str, Sequence[str]], path: Path) -> tuple[str, str] | None:
    """The (group, option) that an entry of a defaults list chooses, None if it chooses nothing. `group` is the one
    that the file belongs to, empty for train.yaml."""
    place = f"in the defaults of {path}"
    ((target, option),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else ((group, entry),)
    overriding = str(target).startswith("override ")
    target = str(target).removeprefix("override ").lstrip("/").partition("@")[0]
    if option in (None, "_self_") or not target:
        return None
    if target not in options:
        problem = f"{target}: no such group{did_you_mean(nearest(target, options))}"
        raise ConfigError(report([problem, f"Groups: {', '.join(options)}"], place))
    check_option(target, str(option), options[target], place)
    if group not in (target, "") and not overriding:
        raise ConfigError(report([f"{target}={option}: already chosen", f"Write override /{target}: {option}"], place))
    return target, str(option)
