"""Which keys of a run's config can make two runs differ, and which values an architecture and its recipe bring."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from ngpt_train.config.architectures import all_keys, architectures
from ngpt_train.config.composition.compose import load_config
from ngpt_train.config.keys import AUTO, TABLES
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import schema_keys
from ngpt_train.config.sections.starts import KINDS
from ngpt_train.config.stored import to_dict
from ngpt_train.config.validate import flatten
from ngpt_train.core.errors import ConfigError

# Sections and keys that the referee does not look at, each with its reason. A key that is not here is looked at.
HARMLESS = {
    "logging": "what is written about a run changes no bit of it",
    "checkpoint": "what is saved changes no bit of what goes on",
    "generate": "a key of another verb than train",
    "evaluate": "a key of another verb than train",
    "plan": "a key of another verb than train",
    "doctor": "a key of another verb than train",
    "study": "a key of another verb than train",
    "compare": "a key of another verb than train",
    "audit": "a key of another verb than train",
    "transfer": "a key of another verb than train",
    "analyze": "a key of another verb than train",
    "probe": "a key of another verb than train",
    "export": "a key of another verb than train",
    "import": "a key of another verb than train",
    "run.name": "a name",
    "run.root": "a place",
    "run.resume": "a run that goes on has the bits of one that was never stopped",
    "run.resume_step": "a run that goes on has the bits of one that was never stopped",
    "run.overwrite": "deletes what was there before the run",
    "run.allow_change": "a permission; what was changed by it is looked at",
    "run.max_time": "a run that it has stopped is not at the end of its schedule, which is looked at",
    "scale.name": "a name; the numbers that it stands for are looked at",
    "optim.lr_table": "a table in which optim.lr was looked up, which is looked at",
    "model.init_table": "a table in which model.init.* was looked up, which is looked at",
    "optim.lr_source": "a sentence about optim.lr, which is looked at",
    "train.stop_at": "a run that it has stopped is not at the end of its schedule, which is looked at",
    "train.profile": "writes a trace of three steps",
    "data.out": "a place",
    "data.cache": "a place",
    "data.cache_gb": "how much text is kept on the disk",
    "data.text_gb": "a size, for plan",
    "data.workers": "processes that read ahead; the rows are the same",
    "data.prepare_workers": "processes that prepare shards; the shards are the same",
    "data.prefetch": "how far processes read ahead",
    "data.fetch_minutes": "how long a download is waited for",
    "parallel.timeout": "how long a rank waits before it gives up",
    "parallel.hang_seconds": "when a rank counts as hung",
    "parallel.check_replicas": "how often replicas are compared",
    "eval.every": "how often a run is validated; validations change no weight",
    "eval.tasks": "what a run is asked beside its validation; answers change no weight",
    "eval.tasks_every": "what a run is asked beside its validation; answers change no weight",
    "eval.tasks_path": "what a run is asked beside its validation; answers change no weight",
}

# How the work is shared and computed. It changes seconds, and numbers within rounding alone, unless a norm takes its
# statistics over the rows of a micro batch.
HARDWARE = {
    *("train.micro_rows", "train.device", "train.compile", "train.cuda_graphs", "train.activation_checkpointing"),
    *("train.deterministic", "kernels", "parallel", "world_size", "threads"),
}
# What it means that a fact of run.json differs.
MEANING = {
    "git_commit": "other code",
    "versions.ngpt_train": "other code",
    "allowed_changes": "keys that were changed when a run was resumed",
    "rollbacks": "how often a run went back to a checkpoint, to go on without the rows of a bad step",
    "versions.torch": "other arithmetic, other speed",
    "device": "seconds are not of one machine, sums are rounded otherwise",
    "cpu": "seconds are not of one machine, sums are rounded otherwise",
    "data_fingerprint": "trained on other tokens",
    "tokenizer_fingerprint": "a token stands for another stretch of text",
}
# Where a text lies and which of it validates: evidence says whether it is the same.
PLACES_OF_TEXT = {"data.path", "data.val_files", "tokenizer.path"}
PLACES_OF_ROWS = {"eval.rows", "eval.tokens", "eval.budget", "eval.contexts"}
# Keys that follow the budget, so that the runs of one arm may differ by them.
OF_THE_BUDGET = {
    *("train.steps", "schedule.warmup_steps", "schedule.warmup_tokens", "model.psi_warmup_steps", "optim.lr"),
}
SIZES = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_mlp", "vocab_size", "context")
# Names of options of an architecture by which neither parameters nor FLOPs change.
OF_NO_SIZE = {
    *("rope_base", "rope_layout", "norm_eps", "softmax_scale", "init", "scale", "alpha_sign"),
    *("embedding_dropout", "residual_dropout", "attention_dropout"),
}
INIT_KEYS = [f"model.init.{kind}" for kind in KINDS]
# Words of the command line that stand for several keys, as a study's arms use them.
GROUPS = {
    "model": ("model.name",),
    # nuGPT's sets starts of the model too.
    "recipe": (
        *("optim", "schedule", "model.lr_rule", "model.reference"),
        *(f"model.{vector}" for vector in ("s_qk", "s_z", "alpha_attn", "alpha_mlp")),
    ),
    "scale": ("scale.name", *(f"model.{size}" for size in SIZES), "train.steps", "train.batch_rows"),
}


def covers(names: Collection[str], key: str) -> bool:
    """Whether `key` is among `names`, or in a section or group of them."""
    spread = [part for name in names for part in GROUPS.get(name, (name,))]
    return any(key == name or key.startswith(f"{name}.") for name in spread)


def is_harmless(key: str) -> bool:
    return covers(HARMLESS, key)


def compared_keys(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of the configs, and model.init.*: older runs lack these, and had their defaults."""
    keys = dict.fromkeys(key for config in configs for key in config) | dict.fromkeys(INIT_KEYS)
    return [key for key in keys if not is_harmless(key)]


def is_own_option(key: str) -> bool:
    """Whether `key` is an option of an architecture, and not one that all architectures share."""
    shared = {field.name for field in fields(ModelConfig)}
    return key.startswith("model.") and key.removeprefix("model.").partition(".")[0] not in shared


def is_shared_option(key: str) -> bool:
    """Whether `key` is an option that all architectures share, and no size."""
    name = key.removeprefix("model.")
    return key.startswith("model.") and not is_own_option(key) and name not in (*SIZES, "name")


def is_of_training(key: str) -> bool:
    """Whether `key` says how an arm is trained or where it starts: what a baseline could be tuned in."""
    starts = key.startswith("model.") and key.endswith((".init", ".scale"))  # of nGPT's vectors
    return starts or covers(("optim", "schedule", "train.batch_tokens", "model.init"), key)


class Absent:
    """In the place of a value: an architecture has no such key, or nobody knows the value."""

    def __init__(self, why: str) -> None:
        self.why = why


NO_SUCH_KEY, UNKNOWN = Absent("no such key"), Absent("does not say it")


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """The value of `key` in a config that may lack keys: then the schema's default, NO_SUCH_KEY or UNKNOWN."""
    if key in config:
        return config[key]
    architecture = architectures().get(config.get("model.name", ModelConfig.name))
    known = schema_keys(architecture) if architecture else all_keys()
    if key not in known:
        return NO_SUCH_KEY if key in all_keys() else UNKNOWN
    return UNKNOWN if known[key].default == AUTO else known[key].default


def brought(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key of model.*, optim.* or schedule.* that the run's architecture and its recipe bring at the
    run's size and budget; UNKNOWN where nothing is known."""
    sizes = [f"model.{name}" for name in ("d_model", "n_layers", "n_heads", "context")]
    numbers = {name: config[name] for name in (*sizes, "train.steps", "train.batch_rows") if name in config}
    name, scale = config.get("model.name", ModelConfig.name), config.get("scale.name")
    if key in numbers or not key.startswith(("model.", "optim.", "schedule.", "data.objective")):
        return UNKNOWN
    try:
        found = _recipe(name, scale, tuple(numbers.items()))
    except TypeError:  # a list in the place of a number, which cannot be looked up
        found = None
    return UNKNOWN if found is None else found.get(key, NO_SUCH_KEY)


@cache
def _recipe(name: str, scale: str | None, numbers: tuple[tuple[str, Any], ...]) -> Mapping[str, Any] | None:
    """The config that `train model=NAME` has at this size and budget, None where it cannot be composed."""
    overrides = [f"model={name}", *(f"{key}={value}" for key, value in numbers)]
    of_scale = [] if scale is None else [f"scale={scale}"]
    # A scale of the user's own is not found, and has no learning rate in the table.
    for chosen, unknown in (([*of_scale, *overrides], ()), ([*overrides, "optim.lr=1"], ("optim.lr",))):
        with contextlib.suppress(ConfigError):
            found = dict(flatten(to_dict(load_config(chosen)), TABLES))
            return found | dict.fromkeys(unknown, UNKNOWN)
    return None
