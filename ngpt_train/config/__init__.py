"""Configuration: the keys that there are, their checks, what they resolve to and what excludes each other.

A section of keys and its checks are a file of the room `sections/`; model.* has `model_keys.py`. How values
get there from YAML files and the command line is in the room `composition/`.
"""

from ngpt_train.config.composition.compose import load_config
from ngpt_train.config.composition.yaml_files import config_dir, list_experiments
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config, check
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
