"""The YAML files: where they are, which options each group has, and what they may say."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.config.overrides import check_option
from ngpt_train.config.schema import ConfigError
from ngpt_train.config.validate import (
    Key,
    architectures,
    check_leaf,
    did_you_mean,
    flatten,
    is_interpolation,
    nearest,
    report,
    show,
)

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


def config_dir() -> Path:
    """Directory of the packaged YAML files: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def list_experiments() -> list[str]:
    """Every name that `experiment=NAME` accepts without a directory of the user's own."""
    return _options("experiment", [config_dir()])


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
        for path in sorted(path for group in ("", *GROUPS) for path in (user / group).glob("*.yaml")):
            if (packaged / path.relative_to(user)).is_file():
                print(
                    f"warning: {path} is not used: {packaged / path.relative_to(user)} has the same name;"
                    " rename yours and choose it by its new name",
                    file=sys.stderr,
                )


def group_options(directories: Sequence[Path]) -> dict[str, list[str]]:
    """The options of each group; only the experiment can be none (`null`)."""
    options = {group: _options(group, directories) for group in GROUPS}
    options["experiment"].append("null")
    return options


def find(config_path: str, directories: Sequence[Path]) -> Path:
    """The file of `group/option`, which exists."""
    return next(path for path in (directory / f"{config_path}.yaml" for directory in directories) if path.is_file())


def check_defaults(
    choices: Mapping[str, str], options: Mapping[str, Sequence[str]], directories: Sequence[Path]
) -> None:
    """Raises ConfigError for a mistake in the defaults list of train.yaml, of a chosen file, or of one that these
    name in turn."""
    options = {**options, SCHEMA_GROUP: list(architectures())}
    root = find(PRIMARY, directories)
    pending = list(choices.items())
    pending += filter(None, (_choice(entry, "", options, root) for entry in _defaults(root)))
    seen = set(pending)
    while pending:
        group, option = pending.pop()
        if group == SCHEMA_GROUP or option == "null":
            continue
        path = find(f"{group}/{option}", directories)
        for named in filter(None, (_choice(entry, group, options, path) for entry in _defaults(path))):
            if named not in seen:
                seen.add(named)
                pending.append(named)


def check_file(path: Path, config_path: str, package: str, keys: Mapping[str, Key]) -> list[str]:
    """The keys that the file sets, dotted and complete. Raises ConfigError for one that is unknown or whose value
    is wrong. `package` is the section that the file fills, empty for the root."""
    tree = read_mapping(path)
    tree.pop("defaults", None)
    place = f"in {path}"
    group = config_path.partition("/")[0]
    if group in _GLOBAL_GROUPS and package:
        raise ConfigError(
            f"{path}: the first line is not '{_HEADER}'\n  Files of {group}/ need it: their keys are full names"
        )
    names = []
    for name, value in flatten(tree, keys, f"{package}." if package else ""):
        bare = name.removeprefix(f"{package}.")
        if name not in keys and bare in keys:
            fix = f"Write {bare.removeprefix(f'{group}.')}, or make '{_HEADER}' the first line of the file"
            raise ConfigError(report([f"{name}={show(value)}: no such key", fix], place))
        if name not in keys or not is_interpolation(value):
            check_leaf(name, value, keys, place)
        names.append(name)
    return names


def read_mapping(path: Path) -> dict[Any, Any]:
    """The content of a YAML file, interpolations unresolved. Raises ConfigError with file and line."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a UTF-8 text in YAML: {error}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a list, but a config file is a mapping of keys to values")
    return tree


def _options(group: str, directories: Sequence[Path]) -> list[str]:
    paths = ((directory / group, path) for directory in directories for path in (directory / group).rglob("*.yaml"))
    return sorted({path.relative_to(root).with_suffix("").as_posix() for root, path in paths})


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
