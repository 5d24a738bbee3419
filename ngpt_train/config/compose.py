"""From YAML files and the command line to a checked `Config`.

Hydra finds and merges the files. Every file and override is checked against the schema before, so that a
mistake is reported in the words of this package, with the file that holds it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ngpt_train.config.files import (
    GROUPS,
    PRIMARY,
    SCHEMA_GROUP,
    check_defaults,
    check_file,
    find,
    group_options,
    row_nodes,
    search_path,
    warn_shadowed,
)
from ngpt_train.config.overrides import Overrides, parse
from ngpt_train.config.resolve import Origin, check, resolve
from ngpt_train.config.schema import Config
from ngpt_train.config.validate import (
    Key,
    architectures,
    build,
    check_leaf,
    flatten,
    is_interpolation,
    report,
    schema_keys,
    show,
)
from ngpt_train.core.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_ONE_HYDRA = threading.Lock()  # Hydra's state is global


@dataclass
class Composition:
    """A composed configuration in which `auto` is still `auto`, and what it was composed from."""

    config: Config
    keys: dict[str, Key]
    choices: dict[str, str]
    origins: dict[str, Origin]


def load_config(overrides: Sequence[str] = (), config_dir: str | None = None, world_size: int | None = None) -> Config:
    """The configuration that the arguments `overrides` (`group=option`, `key=value`) stand for.

    Filled in are optim.lr, schedule.warmup_steps, run.name, train.batch_rows and batch_tokens,
    model.n_kv_heads, model.d_mlp; what depends on the machine or the tokenizer may stay `auto`.
    `config_dir` adds a directory of the user's own YAML files; `world_size` is the number of ranks that share
    the batch, by default torchrun's. Raises ConfigError.
    """
    composition = compose(overrides, config_dir)
    resolve(composition.config, composition.origins)
    check(composition.config, world_size, composition.origins)
    return composition.config


def compose(arguments: Iterable[str], user_dir: str | None = None) -> Composition:
    """Composes and checks key by key; keys that belong together are for `resolve` and `check`.
    Raises ConfigError."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    directories = search_path(user_dir)
    options = group_options(directories)
    overrides = parse(arguments, options)
    reached = check_defaults(overrides.choices, options, directories)
    warn_shadowed(directories)

    chosen = [f"{group}={option}" for group, option in overrides.choices.items()]
    for directory in directories[1:]:
        chosen.append(f"hydra.searchpath=['file://{_quoted(str(directory))}']")
    with _ONE_HYDRA, _hydra(str(directories[0]), row_nodes(reached, options, directories)):
        defaults = GlobalHydra.instance().config_loader().compute_defaults_list(PRIMARY, chosen, RunMode.RUN).defaults
        packages = {default.config_path: default.package or "" for default in defaults if default.config_path}
        choices = {group: option for group, _, option in (path.partition("/") for path in packages) if group in options}
        architecture = _architecture(packages, find(f"model/{choices['model']}", directories))
        keys = schema_keys(architectures()[architecture])
        origins = _check_keys(packages, options, directories, overrides, keys, architecture)
        tree = hydra.compose(PRIMARY, chosen)

    config = build(_resolved(tree, overrides.values, keys, origins), architectures()[architecture])
    if config.model.name != architecture:
        problem = f"model.name={config.model.name}: the architecture is {architecture}"
        fix = f"Choose it with model=NAME: {', '.join(architectures())}"
        raise ConfigError(report([problem, fix], origins["model.name"].place))
    return Composition(config, keys, choices, origins)


def _architecture(packages: Iterable[str], model_file: Path) -> str:
    """Name of the schema that the model's file, or one that it builds upon, asks for."""
    for path in packages:
        if path.startswith(f"{SCHEMA_GROUP}/"):
            return path.removeprefix(f"{SCHEMA_GROUP}/")
    raise ConfigError(
        f"{model_file}: does not say which architecture it is\n  Begin it with\n    defaults:\n      - ngpt"
        f"\n  or another of {', '.join(architectures())}"
    )


def _check_keys(
    packages: Mapping[str, str],
    options: Mapping[str, Sequence[str]],
    directories: Sequence[Path],
    overrides: Overrides,
    keys: Mapping[str, Key],
    architecture: str,
) -> dict[str, Origin]:
    """Checks what the composed files and then the command line set; says where each key was set last."""
    origins: dict[str, Origin] = {}
    order = 0
    for config_path, package in packages.items():
        if config_path.partition("/")[0] in (PRIMARY, *GROUPS):
            for place, names in check_file(config_path, package, keys, options, directories):
                origins |= {name: Origin(order, place) for name in names}
                order += 1
    for name, value in overrides.values.items():
        if name not in keys:
            owners = ", ".join(
                f"model={owner}" for owner, schema in architectures().items() if name in schema_keys(schema)
            )
            raise ConfigError(f"{name}={show(value)}: model={architecture} has no such key\n  It belongs to {owners}")
        if not is_interpolation(value):
            check_leaf(name, value, keys, written=overrides.written[name])
        origins[name] = Origin(order, "")
    return origins


@contextmanager
def _hydra(directory: str, rows: Mapping[str, dict[str, Any]]) -> Iterator[None]:
    """Hydra with our schema, reading `directory`; `rows` it takes for files. Whatever it cannot compose is the user's
    mistake."""
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, schema in architectures().items():
        store.store(group=SCHEMA_GROUP, name=name, node=schema, package="model")
    for config_path, node in rows.items():
        table, _, row = config_path.rpartition("/")
        store.store(group=table, name=row, node=node, package="_global_")
    try:
        with initialize_config_dir(directory, version_base="1.3"):
            yield
    except (HydraException, RecursionError) as error:
        # The checks before leave only tangled defaults lists; the first line says which entry, or that it recurses.
        raise ConfigError(f"the defaults lists do not fit together: {str(error).splitlines()[0]}") from None


def _resolved(
    tree: DictConfig, values: Mapping[str, Any], keys: Mapping[str, Key], origins: Mapping[str, Origin]
) -> dict[str, Any]:
    """`tree` with the command line's `values` and with interpolations replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        for name, value in values.items():
            OmegaConf.update(tree, name, value)
        plain = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
        for name, value in flatten(plain, keys):
            # Interpolations have their values only now.
            check_leaf(name, value, keys, origins[name].place if name in origins else "")
    except OmegaConfBaseException as error:
        name = str(getattr(error, "full_key", ""))
        unresolved = cast(dict[str, Any], OmegaConf.to_container(tree))
        written = {**dict(flatten(unresolved, keys)), **values}
        # "KeyError raised while resolving interpolation: ..." says the same in fewer words from the colon on.
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        lines = [f"{name}={show(written.get(name))}: cannot be resolved: {reason}", "A literal '${' is written '\\${'"]
        raise ConfigError(report(lines, origins[name].place if name in origins else "")) from None
    return plain


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
