"""Configuration: the typed schema, and its way from YAML files and the command line to a checked `Config`.

Only this package knows Hydra and OmegaConf, and it imports them when something is composed. The sections of the schema
are in `schema.py`, `data_keys.py` and `model_keys.py`.
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
