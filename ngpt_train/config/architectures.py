"""The architectures that there are: the folders of ngpt_train/models that have keys."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

import ngpt_train.models
from ngpt_train.config.model_keys import ModelConfig


@cache
def architectures() -> dict[str, type[ModelConfig]]:
    """The keys of each architecture by its name, which is its folder's. Nothing heavy is imported."""
    names = [found.name for found in pkgutil.iter_modules(ngpt_train.models.__path__) if found.ispkg]
    names = [name for name in names if any((Path(p) / name / "keys.py").is_file() for p in ngpt_train.models.__path__)]
    modules = [importlib.import_module(f"ngpt_train.models.{name}.keys") for name in names]
    schemas = [
        schema
        for module in modules
        for schema in vars(module).values()
        if isinstance(schema, type) and issubclass(schema, ModelConfig) and schema.__module__ == module.__name__
    ]
    return {schema.name: schema for schema in schemas}
