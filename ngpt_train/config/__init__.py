"""Configuration: the typed schema, and its way from YAML files and the command line to a checked `Config`.

Only this package knows Hydra and OmegaConf, and it imports them when something is composed.
"""

from ngpt_train.config.compose import load_config
from ngpt_train.config.conflicts import check
from ngpt_train.config.files import config_dir, list_experiments
from ngpt_train.config.keys import AUTO
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    EvaluateConfig,
    GenerateConfig,
    KernelsConfig,
    LoggingConfig,
    OptimConfig,
    ParallelConfig,
    PlanConfig,
    RunConfig,
    ScaleConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
    WandbConfig,
)
from ngpt_train.config.stored import check_resume, read_yaml, redact, to_dict, to_yaml, write_yaml
from ngpt_train.core.errors import ConfigError, DataError

__all__ = [
    "AUTO",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EvalConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "KernelsConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PlanConfig",
    "RunConfig",
    "ScaleConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainConfig",
    "WandbConfig",
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
