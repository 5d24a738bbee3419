"""From YAML files and the command line to a checked `Config`.

Hydra reads the defaults lists: which files count, in which order, for which section. Every file and override is checked
against the schema before it counts, so that a mistake is reported in our words, with its file.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, cast

from ngpt_train.config.architectures import architectures
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.overrides import Overrides, parse
from ngpt_train.config.schema import Config, build, check, schema_keys
from ngpt_train.config.stored import check_allowed
from ngpt_train.config.validate import Key, Origin, check_leaf, flatten, is_interpolation, mistake, nested, show
from ngpt_train.config.yaml_files import GROUPS, PRIMARY, SCHEMA_GROUP, Files
from ngpt_train.core.errors import ConfigError
from ngpt_train.core.secrets import note_variables, without_variables

_ONE_HYDRA = threading.Lock()  # Hydra's state is global


@dataclass
class Composition:
    """A composed configuration in which `auto` is still `auto`, and what it was composed from."""

    config: Config
    keys: dict[str, Key]
    choices: dict[str, str]
    origins: dict[str, Origin]
    files: Files


def load_config(overrides: Sequence[str] = (), config_dir: str | None = None, world_size: int | None = None) -> Config:
    """The configuration that the arguments `overrides` (`group=option`, `key=value`) stand for.

    Filled in are optim.lr, schedule.warmup_steps, run.name, train.batch_rows and batch_tokens, eval.rows or tokens,
    model.n_kv_heads, model.d_mlp, logging.wandb.name, group and tags; what depends on the machine or the tokenizer may
    stay `auto`. `config_dir` adds a directory of the user's own YAML files; `world_size` is the number of ranks that
    share the batch, by default torchrun's. Raises ConfigError.
    """
    composition = compose(overrides, config_dir)
    composition.config.resolve(composition.origins, composition.choices.get("experiment"))
    check(composition.config, world_size, composition.origins)
    check_allowed(composition.config)
    return composition.config


def compose(arguments: Sequence[str], user_dir: str | None = None) -> Composition:
    """Composes and checks key by key; keys that belong together are for `resolve` and `check`. Raises ConfigError."""
    files = Files(user_dir)
    overrides = parse(arguments, files.options)
    lists = files.defaults_lists(overrides.choices)
    files.warn_shadowed()
    # Hydra knows no `null` of a group of which it has seen an option.
    chosen = tuple(f"~{group}" if name == "null" else f"{group}={name}" for group, name in overrides.choices.items())
    packages = _in_order(chosen, json.dumps(lists))
    choices = {group: name for group, _, name in (path.partition("/") for path in packages) if group in GROUPS}
    layout_of = re.sub(r"_\d+k$", "", choices.get("hardware", "").rpartition("/")[2])  # a100_80gb/1b_4k is 1b's
    if layout_of in files.options["scale"] and f"scale/{layout_of}" not in packages:
        _warn_of_layout(choices["hardware"], layout_of, choices["scale"])

    architecture = _architecture(files, packages, choices["model"])
    schema = architectures()[architecture]
    keys = schema_keys(schema)
    values: dict[str, Any] = {}
    origins = {name: Origin() for name in keys}
    options = [(files.option(path), package) for path, package in packages.items() if path in lists]
    said_by_files = (said for option, package in options for said in files.said(option, package, keys))
    for order, (place, said) in enumerate(said_by_files):
        for name, value in said.items():
            # Tables are merged, so that a recipe that builds upon another keeps its scales.
            values[name] = _merged(values.get(name), value) if keys[name].is_table else value
            origins[name] = Origin(order, place)
    _check_overrides(overrides, architecture)
    values |= overrides.values
    origins |= {name: Origin(sys.maxsize) for name in overrides.values}

    config = build(values | _resolved(values, schema, origins), schema)
    if config.model.name != architecture:
        problem = f"model.name={config.model.name}: the architecture is {architecture}"
        fix = f"Choose it with model=NAME: {', '.join(architectures())}"
        raise mistake(problem, fix, place=origins["model.name"].place)
    return Composition(config, keys, choices, origins, files)


@cache  # a study composes often
def _warn_of_layout(hardware: str, layout_of: str, scale: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        fix = f"choose scale={layout_of}, or leave hardware out"
        print(f"warning: hardware={hardware} is a layout for scale={layout_of}, not {scale}; {fix}", file=sys.stderr)


@lru_cache(maxsize=256)  # Hydra takes ten times as long as all the rest
def _in_order(chosen: Sequence[str], lists: str) -> dict[str, str]:
    """The section that each file fills, by its path `group/option`, in the order in which the files count. `chosen` are
    the command line's `group=option`, `~group` for none, `lists` is JSON of Files.defaults_lists. Raises ConfigError
    for lists that Hydra cannot order."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    store = ConfigStore.instance()
    with _ONE_HYDRA:
        for name in architectures():
            store.store(group=SCHEMA_GROUP, name=name, node={}, package="model")
        for config_path, (defaults, package) in json.loads(lists).items():
            group, _, name = config_path.rpartition("/")
            store.store(group=group or None, name=name, node={"defaults": defaults}, package=package)
        try:
            with hydra.initialize(config_path=None, version_base="1.3"):
                loader = GlobalHydra.instance().config_loader()
                ordered = loader.compute_defaults_list(PRIMARY, list(chosen), RunMode.RUN).defaults
        except (HydraException, RecursionError, ValueError) as error:
            # Files has checked each entry; what is left are entries that clash, and the first line says which.
            first_line = str(error).splitlines()[0]
            raise ConfigError(f"the defaults lists do not fit together: {first_line}") from None
    return {default.config_path: default.package or "" for default in ordered if default.config_path}


def _architecture(files: Files, packages: Mapping[str, str], model: str) -> str:
    """The architecture whose schema the file of model=`model` names. Raises ConfigError if it names none."""
    for group, _, name in (path.rpartition("/") for path in packages):
        if group == SCHEMA_GROUP:
            return name
    problem = f"{files.option(f'model/{model}').path}: does not say which architecture it is"
    example = "Begin it with\n    defaults:\n      - ngpt"
    raise mistake(problem, example, f"or another of {', '.join(architectures())}")


def _check_overrides(overrides: Overrides, architecture: str) -> None:
    """Raises ConfigError for a key on the command line that `architecture` lacks, or that does not take its value."""
    keys = schema_keys(architectures()[architecture])
    for name, value in overrides.values.items():
        if name not in keys:
            owners = [f"model={owner}" for owner, schema in architectures().items() if name in schema_keys(schema)]
            problem = f"{name}={show(value)}: model={architecture} has no such key"
            raise mistake(problem, f"It belongs to {', '.join(owners)}")
        if not is_interpolation(value):
            check_leaf(name, value, keys, written=overrides.written[name])


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


@cache  # omegaconf takes a tenth of a second
def _typed(schema: type[ModelConfig]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.structured(Config(model=schema()))


def _resolved(values: Mapping[str, Any], schema: type[ModelConfig], origins: Mapping[str, Origin]) -> dict[str, Any]:
    """`values`, with ${scale.name} and ${oc.env:HOME} replaced by the key's value and the environment's."""
    keys = schema_keys(schema)
    interpolated = [name for name in keys if is_interpolation(values.get(name))]
    if not interpolated:
        return {}
    for name in interpolated:
        note_variables(values[name])
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # By the schema's types: an environment variable is text, and train.steps=${oc.env:STEPS} a number.
        tree = OmegaConf.merge(_typed(cast(Any, schema)), nested(values))
        found = dict(flatten(cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True)), keys))
    except RecursionError:
        deepest = max(interpolated, key=lambda name: str(values[name]).count("${"))
        raise mistake(f"{deepest}: its interpolations are nested without end", "Write the value itself") from None
    except OmegaConfBaseException as error:
        name = str(getattr(error, "full_key", ""))
        # "KeyError raised while resolving interpolation: ..." says the same in fewer words from the colon on.
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        reason = without_variables(reason)  # which may be secrets
        lines = [f"{name}={show(values.get(name))}: cannot be resolved: {reason}", "A literal '${' is written '\\${'"]
        raise mistake(*lines, place=origins.get(name, Origin()).place) from None
    for name in interpolated:
        check_leaf(name, found[name], keys, origins[name].place)
    return {name: found[name] for name in interpolated}
