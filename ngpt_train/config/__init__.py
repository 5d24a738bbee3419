"""Configuration: the keys that there are, their checks, what they resolve to and what excludes each other.

The sections of the schema are in `schema.py`, `model_keys.py` and the room `sections/`. How values get there from YAML
files and the command line is in the room `composition/`.
"""

from ngpt_train.config.composition.compose import load_config
from ngpt_train.config.composition.files import config_dir, list_experiments
from ngpt_train.config.conflicts import check
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import check_resume, read_yaml, redact, to_dict, to_yaml, write_yaml
from ngpt_train.core.errors import ConfigError, DataError

__all__ = [
    "Config",
    "ConfigError",
    "DataError",
    "ModelConfig",
    "check",
    "check_resume",
    "config_dir",
    "list_experiments",
    "load_config",
    "read_yaml",
    "redact",
    "to_dict",
    "to_yaml",
    "write_yaml",
]
