"""Configuration: the keys that there are, their checks, what they resolve to and what excludes each other.

A section of keys and its checks are a file of the room `sections/`; model.* has `model_keys.py`. `compose.py` brings
values there from YAML files (`yaml_files.py`) and the command line (`overrides.py`): they alone know Hydra and
OmegaConf, and import them when something is composed.
"""

from ngpt_train.config.compose import load_config
from ngpt_train.config.schema import Config
from ngpt_train.config.yaml_files import list_experiments
from ngpt_train.core.errors import ConfigError, DataError

__all__ = ["Config", "ConfigError", "DataError", "list_experiments", "load_config"]
