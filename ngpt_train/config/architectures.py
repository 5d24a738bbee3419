"""The architectures that there are, and the keys of each: the folders of ngpt_train/models, and plug-ins."""

import importlib
from collections.abc import Sequence
from functools import cache
from os.path import realpath  # Path.resolve raises RuntimeError for a link to itself
from pathlib import Path

import ngpt_train.models
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import schema_keys
from ngpt_train.config.validate import Key, mistake
from ngpt_train.core.errors import ConfigError

_FORM = (
    "A plug-in is a folder NAME that holds keys.py, model.py, configs/model/NAME.yaml and configs/recipe/NAME.yaml: "
    "docs/add_an_architecture.md"
)


@cache
def architectures() -> dict[str, type[ModelConfig]]:
    """The keys of each architecture by its name, which is its folder's. Nothing heavy is imported."""
    (path,) = ngpt_train.models.__path__
    names = sorted(keys.parent.name for keys in Path(path).glob("*/keys.py"))
    return {name: _keys_of(name) for name in [*names, *(folder.name for folder in plugins())]}


def plugins() -> list[Path]:
    """The folders of the plug-ins in use."""
    return [Path(folder) for folder in ngpt_train.models.plugins()]


def use_plugins(folders: Sequence[str]) -> None:
    """Makes these folders the only plug-ins, here and in processes of this one. Raises ConfigError."""
    paths = list(dict.fromkeys(Path(realpath(Path(folder).expanduser())) for folder in folders))
    for folder, path in zip(folders, paths, strict=False):
        if not path.is_dir():
            raise _unusable(path, "no such directory" if folder == str(path) else f"no such directory: {path}")
        needed = ("keys.py", "model.py", f"configs/model/{path.name}.yaml", f"configs/recipe/{path.name}.yaml")
        if missing := [name for name in needed if not (path / name).is_file()]:
            raise _unusable(path, f"holds no {' and no '.join(missing)}")
        taken = [p for p in paths if p != path and p.name == path.name]
        taken += [p for p in Path(ngpt_train.models.__path__[0]).iterdir() if p.stem == path.name]
        if taken or not path.name.isidentifier():
            raise _unusable(path, f"the name is that of {taken[0]}" if taken else "the name is not one of Python's")
    if paths != plugins():
        ngpt_train.models.use_plugins([str(path) for path in paths])
        architectures.cache_clear()
        all_keys.cache_clear()


@cache
def all_keys() -> dict[str, Key]:
    """The keys of every architecture together."""
    return {name: key for model in architectures().values() for name, key in schema_keys(model).items()}


def _keys_of(name: str) -> type[ModelConfig]:
    """The dataclass of an architecture's keys.py. Raises ConfigError where a plug-in's does not have the form."""
    plugin = next((path for path in plugins() if path.name == name), None)
    try:
        module = importlib.import_module(f"ngpt_train.models.{name}.keys")
        own = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
        (schema,) = [x for x in own if issubclass(x, ModelConfig) and "__dataclass_fields__" in vars(x)]
        if schema.name != name:
            raise ValueError(f"its name is {schema.name}")
        for key in schema_keys(schema).values():
            if problem := key.problem(key.default):
                raise ValueError(f"the default of {key.name}, {key.default!r}: {problem}")
    except Exception as error:
        if plugin is None:
            raise
        form = f'One @dataclass of ModelConfig with name: str = key("{name}", ...), every key made by key(...)'
        reason = f"{type(error).__name__}: {error}"
        raise mistake(f"--plugin={plugin}: keys.py cannot be used: {reason}", form) from error
    return schema


def _unusable(path: Path, problem: str) -> ConfigError:
    return mistake(f"--plugin={path}: {problem}", _FORM)
