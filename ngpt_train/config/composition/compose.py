"""From YAML files and the command line to a checked `Config`.

Hydra reads the defaults lists: which files count, in which order, for which section. Every file and override is checked
against the schema before it counts, so that a mistake is reported in the words of this package, with the file that
holds it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

from ngpt_train.config.architectures import architectures, build, schema_keys
from ngpt_train.config.composition.files import GROUPS, PRIMARY, SCHEMA_GROUP, Files, find_files, nested
from ngpt_train.config.composition.overrides import Overrides, parse
from ngpt_train.config.conflicts import check
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.resolve import resolve
from ngpt_train.config.schema import Config
from ngpt_train.config.validate import Key, Origin, check_leaf, flatten, is_interpolation, mistake, show
from ngpt_train.core.errors import ConfigError

_ONE_HYDRA = threading.Lock()  # Hydra's state is global


@dataclass
class Composition:
    """A composed configuration in which `auto` is still `auto`, and what it was composed from."""

    config: Config
    keys: dict[str, Key]
    choices: dict[str, str]
    origins: dict[str, Origin]
    files: Files


class _OfFiles(NamedTuple):
    """What the files alone come to."""

    architecture: str
    choices: dict[str, str]
    values: dict[str, Any]
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


def compose(arguments: Sequence[str], user_dir: str | None = None) -> Composition:
    """Composes and checks key by key; keys that belong together are for `resolve` and `check`.
    Raises ConfigError."""
    files = find_files(user_dir)
    overrides = parse(arguments, files.options)
    chosen = tuple(overrides.choices.items())
    reached = files.reached(chosen)
    files.warn_shadowed()
    of_files = _compose_files(files, chosen, tuple(reached))
    schema = architectures()[of_files.architecture]
    keys, origins = schema_keys(schema), of_files.origins | _origins(overrides, of_files.architecture)
    config = build(_resolved({**of_files.values, **overrides.values}, schema, origins), schema)
    if config.model.name != of_files.architecture:
        problem = f"model.name={config.model.name}: the architecture is {of_files.architecture}"
        fix = f"Choose it with model=NAME: {', '.join(architectures())}"
        raise mistake(problem, fix, place=origins["model.name"].place)
    return Composition(config, keys, of_files.choices, origins, files)


@lru_cache(maxsize=256)
def _compose_files(files: Files, chosen: tuple[tuple[str, str], ...], reached: tuple[str, ...]) -> _OfFiles:
    """Checks what the files set, the later over the earlier, and says where each key was set last."""
    packages = _defaults_list(files, chosen, reached)
    choices = {group: name for group, _, name in (path.partition("/") for path in packages) if group in GROUPS}
    named = [path.removeprefix(f"{SCHEMA_GROUP}/") for path in packages if path.startswith(f"{SCHEMA_GROUP}/")]
    if not named:
        path, example = files.option(f"model/{choices['model']}").path, "Begin it with\n    defaults:\n      - ngpt"
        raise mistake(
            f"{path}: does not say which architecture it is", example, f"or another of {', '.join(architectures())}"
        )
    keys = schema_keys(architectures()[named[0]])
    values: dict[str, Any] = {name: key.default for name, key in keys.items()}
    origins: dict[str, Origin] = {}
    order = 0
    for config_path, package in packages.items():
        if config_path.partition("/")[0] in (PRIMARY, *GROUPS):
            for place, said in files.said(files.option(config_path), package, keys):
                for name, value in said.items():
                    # Tables are merged, so that a recipe that builds upon another keeps its scales.
                    values[name] = _merged(values[name], value) if keys[name].is_table else value
                    origins[name] = Origin(order, place)
                order += 1
    return _OfFiles(named[0], choices, values, origins)


def _defaults_list(files: Files, chosen: Sequence[tuple[str, str]], reached: Sequence[str]) -> dict[str, str]:
    """The sections that train.yaml and the files of `group/option` fill, by these names, in the order in which they
    count. What Hydra cannot order is the user's mistake."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    store = ConfigStore.instance()
    with _ONE_HYDRA:
        for name in architectures():
            store.store(group=SCHEMA_GROUP, name=name, node={}, package="model")
        for config_path in (PRIMARY, *reached):
            option, (group, _, name) = files.option(config_path), config_path.rpartition("/")
            node = {"defaults": files.defaults(option)} if "defaults" in option.tree() or option.row else {}
            store.store(group=group or None, name=name, node=node, package=option.package())
        try:
            with hydra.initialize(config_path=None, version_base="1.3"):
                loader = GlobalHydra.instance().config_loader()
                defaults = loader.compute_defaults_list(
                    PRIMARY, [f"{group}={option}" for group, option in chosen], RunMode.RUN
                ).defaults
        except (HydraException, RecursionError) as error:
            # The checks before leave only tangled lists; the first line says which entry, or that it recurses.
            first_line = str(error).splitlines()[0]
            raise ConfigError(f"the defaults lists do not fit together: {first_line}") from None
    return {default.config_path: default.package or "" for default in defaults if default.config_path}


def _origins(overrides: Overrides, architecture: str) -> dict[str, Origin]:
    """Checks what the command line sets, which counts last."""
    keys = schema_keys(architectures()[architecture])
    for name, value in overrides.values.items():
        if name not in keys:
            owners = [f"model={owner}" for owner, schema in architectures().items() if name in schema_keys(schema)]
            problem = f"{name}={show(value)}: model={architecture} has no such key"
            raise mistake(problem, f"It belongs to {', '.join(owners)}")
        if not is_interpolation(value):
            check_leaf(name, value, keys, written=overrides.written[name])
    return {name: Origin.of_command_line() for name in overrides.values}


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def _resolved(values: Mapping[str, Any], schema: type[ModelConfig], origins: Mapping[str, Origin]) -> dict[str, Any]:
    """The tree of `values`, with interpolations replaced."""
    tree = nested(values)
    interpolated = [name for name, value in values.items() if is_interpolation(value)]
    if not interpolated:
        return tree
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # By the schema's types: an environment variable is text, and train.steps=${oc.env:STEPS} a number.
        typed = OmegaConf.structured(Config(model=schema()))
        resolved = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(typed, tree), resolve=True))
        found = dict(flatten(resolved, schema_keys(schema)))
        for name in interpolated:
            check_leaf(name, found[name], schema_keys(schema), origins.get(name, Origin()).place)
    except OmegaConfBaseException as error:
        name = str(getattr(error, "full_key", ""))
        # "KeyError raised while resolving interpolation: ..." says the same in fewer words from the colon on.
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        lines = [f"{name}={show(values.get(name))}: cannot be resolved: {reason}", "A literal '${' is written '\\${'"]
        raise mistake(*lines, place=origins.get(name, Origin()).place) from None
    return resolved
