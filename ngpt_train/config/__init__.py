"""Configuration: the typed schema, and its way from YAML files and the command line to a checked `Config`.

Only this package knows Hydra and OmegaConf, and it imports them when something is composed.
"""

from ngpt_train.config.architectures import GPTConfig, ModelConfig, NGPTConfig, NormFormerConfig, PowerNormConfig
from ngpt_train.config.compose import load_config
from ngpt_train.config.files import config_dir, list_experiments
from ngpt_train.config.keys import AUTO, ConfigError, DataError
from ngpt_train.config.resolve import check
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

__all__ = [
    "AUTO",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EvalConfig",
    "EvaluateConfig",
    "GPTConfig",
    "GenerateConfig",
    "KernelsConfig",
    "LoggingConfig",
    "ModelConfig",
    "NGPTConfig",
    "NormFormerConfig",
    "OptimConfig",
    "ParallelConfig",
    "PlanConfig",
    "PowerNormConfig",
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
