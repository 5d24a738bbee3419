"""The configuration of a run as a file: written without secrets, read back checked, compared on a resume."""

import copy
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ngpt_train.config.architectures import all_keys, architectures
from ngpt_train.config.keys import AUTO, name_of
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config, build, schema_keys
from ngpt_train.config.sections.data import commits_of, with_commits
from ngpt_train.config.validate import any_of, check_leaf, did_you_mean, flatten, mistake, show, similar_keys
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import write_atomically, yaml_tree
from ngpt_train.core.secrets import redacted

# Keys that earlier versions stored with every run, and that changed no bit of one: they are not read.
GONE = ("bench.", "transfer.patch")

# What run.allow_change may let through: with it the checkpoint still fits the model and the position in the data.
_MAY_BE_ALLOWED = ("optim", "schedule", "train", "guards")


def to_dict(section: Any) -> dict[str, Any]:
    """The configuration, or a section of it, as plain dicts and lists: dataclasses.asdict by the names of the keys."""
    return {
        name_of(field): to_dict(value) if dataclasses.is_dataclass(value) else copy.deepcopy(value)
        for field in dataclasses.fields(section)
        for value in [getattr(section, field.name)]
    }


def to_yaml(config: Config) -> str:
    """YAML of the configuration, secrets redacted."""
    import yaml

    return yaml.safe_dump(redact(to_dict(config)), sort_keys=False, allow_unicode=True)


def write_yaml(config: Config, path: str | os.PathLike[str]) -> None:
    """Writes the configuration, secrets redacted; `path` is complete or untouched."""
    write_atomically(Path(path), to_yaml(config).encode())


def read_yaml(path: str | os.PathLike[str]) -> Config:
    """The configuration that `write_yaml` wrote. Raises DataError, naming the file, unless it fits the schema;
    keys that the file lacks have their defaults."""
    import yaml

    try:
        tree = yaml_tree(Path(path))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or a day that is none
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"{path}: not a readable config: {problem}") from None
    model = tree.get("model", {}) if isinstance(tree, dict) else {}
    name = model.get("name") if isinstance(model, dict) else None
    if name not in architectures():
        problem = f"{path}: not the config of a run: model.name={show(name)} is not {any_of(architectures())}"
        if isinstance(name, str) and name.isidentifier():
            problem += f"\n  If it was trained with a plug-in, name its folder again: --plugin .../{name}"
        raise DataError(problem)
    schema = architectures()[name]
    keys = schema_keys(schema)
    values = {key: value for key, value in flatten(tree, keys) if not key.startswith(GONE)}
    try:
        for key, value in values.items():
            check_leaf(key, value, keys)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from None
    config = build(values, schema)
    config.model.settle_starts()  # a run from before these keys existed began with the paper's
    return config


def redact(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` without secrets. The schema's own words, such as cosine, are never taken for secrets: redacted,
    they could not be read back."""
    return redacted(tree, {choice for key in all_keys().values() for choice in key.choices or ()})


def what_differs(stored: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Name, stored value and new value of each key that a run must not change from `stored` to `new`, both resolved."""
    keys = all_keys()
    trees = to_dict(stored), to_dict(new), redact(to_dict(new))
    old_values, new_values, as_stored = (dict(flatten(tree, keys)) for tree in trees)
    return [
        (name, old_values.get(name, "(none)"), as_stored.get(name, "(none)"))
        for name in dict.fromkeys([*old_values, *new_values])
        if old_values.get(name) not in (new_values.get(name), as_stored.get(name))
        and not (keys[name].may_change or _may_change_here(name, stored, new))
    ]


def differing_weights(stored: ModelConfig, model: ModelConfig) -> list[str]:
    """In words, the keys by which the weights of `stored` are those of another model than `model`."""
    if stored.name != model.name:  # the other keys are of two architectures
        return [f"model.name: {stored.name} in the checkpoint, {model.name} here"]
    free = model.not_in_weights() | ({"n_classes", "tied_embeddings"} if model.n_classes else set())
    return [
        f"model.{key}: {getattr(stored, key, None)} in the checkpoint, {value} here"
        for key, value in vars(model).items()
        # A vocabulary that is still auto is checked again once the tokenizer is known.
        if key not in free and value != AUTO and getattr(stored, key, None) != value
    ]


def check_allowed(config: Config) -> None:
    """Raises ConfigError where run.allow_change names what no resume may change, or no key."""
    for name in config.run.allow_change or []:
        is_key = name in all_keys()
        if not is_key or name.partition(".")[0] not in _MAY_BE_ALLOWED:
            why = "cannot be changed on a resume" if is_key else "is no key"
            similar = "" if is_key else did_you_mean(similar_keys(name, all_keys()))
            sections = ", ".join(f"{section}.*" for section in _MAY_BE_ALLOWED)
            fix = f"Allowed are keys of {sections}; with other data or another model start another run.name"
            raise mistake(f"run.allow_change={show(config.run.allow_change)}: {name} {why}{similar}", fix)


def check_resume(stored: Config, new: Config) -> None:
    """Raises ConfigError, listing the differences, unless a run that was started with `stored` may go on with
    `new`: with the same mathematics and the same data, but for the keys of run.allow_change. Both are resolved.
    train.steps may only grow, and moments of another kind of optimizer are never taken over."""
    if stored.optim.direction != new.optim.direction:
        old, value = stored.optim.name, new.optim.name
        problem = f"{old} in its checkpoint, {value} here, and the moments of one say nothing to the other"
        fix = f"Give optim.name={old} to go on, or begin a new run with its weights: run.init_from=DIRECTORY"
        raise mistake(f"optim.name: run.name={new.run.name}: {problem}", fix)
    allowed = new.run.allow_change or []
    differences = [difference for difference in what_differs(stored, new) if difference[0] not in allowed]
    if not differences:
        return
    lines = [f"run.name={new.run.name}: the run was started with another configuration; stored -> asked for:"]
    lines += [f"  {name}: {show(old)} -> {show(value)}" for name, old, value in differences]
    if any(name == "train.steps" for name, _, _ in differences):
        lines.append("To stop earlier set train.stop_at; train.steps can only grow.")
    if may := [name for name, _, _ in differences if name.partition(".")[0] in _MAY_BE_ALLOWED]:
        allow = f"run.allow_change=[{','.join(may)}]"
        lines.append(f"To go on with the new values all the same add {allow}; what changes is recorded.")
    fix = "Give the stored values to go on, another run.name for a new run, or run.overwrite=true to delete this one."
    raise ConfigError("\n  ".join([*lines, fix]))


def with_first_values(config: Config, stored: Config) -> Config:
    """`config` with the learning rate and the initialisation that the run began with, where nobody asks for others but
    the recipe's tables do: an entry of lr_table depends on train.steps, which may grow, and a recipe may change.
    stored: the config in the run's checkpoint."""
    if config.model.source_of_starts(config.scale.name):
        config = replace(config, model=replace(config.model))
        config.model.start_as(stored.model)
    if not follows_table(config):
        return config
    optim = replace(config.optim, lr=stored.optim.lr, lr_source=stored.optim.lr_source)
    schedule = config.schedule
    if schedule.final_share is not None:
        schedule = replace(schedule, final_lr=schedule.final_share * float(optim.lr))
    return replace(config, optim=optim, schedule=schedule)


def follows_table(config: Config) -> bool:
    """Whether optim.lr is the entry of lr_table for this config."""
    optim = config.optim
    return bool(optim.row_of(config.scale.name)) and (optim.lr, optim.lr_source) == optim.from_table(config)


def _may_change_here(name: str, stored: Config, new: Config) -> bool:
    """Whether a key that a resumed run must not change may differ between these two."""
    if name == "train.steps":
        return new.train.steps > stored.train.steps
    if name == "optim.lr":
        return follows_table(new) and bool(stored.optim.lr_source)  # the run goes on with the stored one
    if name.removeprefix("model.") in new.model.starts:
        return bool(new.model.source_of_starts(new.scale.name))  # likewise
    if name == "schedule.final_lr":  # a share of optim.lr, which is compared itself
        return None is not stored.schedule.final_share == new.schedule.final_share
    if name == "schedule.warmup_steps":
        # The warmup of a recipe that leaves it to auto follows the steps.
        return all(x.schedule.warmup_steps == x.schedule.auto_warmup(x.train.steps) for x in (stored, new))
    if name in ("model.vocab_size", "train.precision"):
        # auto becomes the tokenizer's number, or what the device computes in, and is compared again then.
        return AUTO in [attrgetter(name)(config) for config in (stored, new)]
    if name in ("data.revision", "data.mixture"):  # a branch stands for the commit that the run began with
        value = getattr(with_commits(new.data, commits_of(stored.data)), name.removeprefix("data."))
        return value == getattr(stored.data, name.removeprefix("data."))
    return name == "data.objective" and stored.data.objective == AUTO  # a run from before this key existed
