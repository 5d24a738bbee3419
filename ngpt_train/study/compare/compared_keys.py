"""The keys that `compare` compares: their kinds, their values in the runs of each arm and budget, and the values that
an architecture and its recipe bring."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from ngpt_train.config.architectures import all_keys, architectures
from ngpt_train.config.compose import load_config
from ngpt_train.config.keys import AUTO, TABLES
from ngpt_train.config.model_keys import KINDS, ModelConfig
from ngpt_train.config.schema import build, schema_keys
from ngpt_train.config.stored import to_dict
from ngpt_train.config.validate import flatten
from ngpt_train.core.errors import ConfigError
from ngpt_train.study.compare.runs import Arms, Run, common_budgets

# Sections and keys which the referee ignores, each with its reason. It compares all others.
HARMLESS = {
    "logging": "records change no bit of the run",
    "checkpoint": "saving changes no bit of the run",
    **dict.fromkeys(("generate", "evaluate", "plan", "doctor", "study", "compare"), "a key of another verb than train"),
    **dict.fromkeys(("audit", "transfer", "analyze", "probe", "export", "import"), "a key of another verb than train"),
    "run.name": "a name",
    **dict.fromkeys(("run.root", "data.out", "data.cache"), "a place"),
    **dict.fromkeys(("run.resume", "run.resume_step"), "a resumed run has the bits of an uninterrupted one"),
    "run.overwrite": "deletes an older run",
    "run.allow_change": "a permission; the changes are compared",
    **dict.fromkeys(("run.max_time", "train.stop_at"), "a stopped run is not annealed, and left out"),
    "scale.name": "a name; its numbers are compared",
    "optim.lr_table": "gives optim.lr, which is compared",
    "model.init_table": "gives model.init.*, which are compared",
    "optim.lr_source": "a sentence about optim.lr, which is compared",
    "train.profile": "writes a trace of three steps",
    "data.cache_gb": "a size on the disk",
    "data.text_gb": "a size, for plan",
    "data.workers": "processes that read ahead; the rows are the same",
    "data.prepare_workers": "processes that prepare shards; the shards are the same",
    "data.prefetch": "rows read ahead",
    "data.fetch_minutes": "a limit for downloads",
    "parallel.timeout": "a limit for waiting ranks",
    "parallel.hang_seconds": "a limit for hung ranks",
    "parallel.check_replicas": "comparisons of replicas change no weight",
    "eval.every": "validations change no weight",
    **dict.fromkeys(("eval.tasks", "eval.tasks_every", "eval.tasks_path"), "tasks change no weight"),
}

# Layout and kernels. They change seconds, and numbers within rounding, unless a norm has statistics over the rows of a
# micro batch.
HARDWARE = {
    *("train.micro_rows", "train.device", "train.compile", "train.cuda_graphs", "train.activation_checkpointing"),
    *("train.deterministic", "kernels", "parallel", "world_size", "threads"),
}
# The meaning of a difference in a fact of run.json.
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
# Places of the text and of its validation rows. Fingerprints and hashes decide whether the text is the same.
PLACES_OF_TEXT = {"data.path", "data.val_files", "tokenizer.path"}
PLACES_OF_ROWS = {"eval.rows", "eval.tokens", "eval.budget", "eval.contexts"}
# Keys that follow the budget, in which the runs of an arm may differ.
OF_THE_BUDGET = {"train.steps", "schedule.warmup_steps", "schedule.warmup_tokens", "model.psi_warmup_steps", "optim.lr"}
OF_A_STEP = {"train.batch_rows", "train.batch_tokens", "model.context"}  # which train.steps and a warm-up follow
SIZES = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_mlp", "vocab_size", "context")
# Options without an effect on parameters and FLOPs.
OF_NO_SIZE = {
    *("rope_base", "rope_layout", "norm_eps", "softmax_scale", "init", "scale", "alpha_sign"),
    *("embedding_dropout", "residual_dropout", "attention_dropout", "activation_dropout"),
    *("logit_soft_cap", "input_gain_decay"),
}
INIT_KEYS = [f"model.init.{kind}" for kind in KINDS]
# Words of the command line, as in a study's arms, for several keys.
GROUPS = {
    "model": ("model.name",),
    # nuGPT's recipe also sets first weights.
    "recipe": (
        *("optim", "schedule", "model.lr_rule", "model.reference", "model.logit_preconditioning"),
        *(f"model.{vector}" for vector in ("s_qk", "s_z", "alpha_attn", "alpha_mlp")),
    ),
    "scale": ("scale.name", *(f"model.{size}" for size in SIZES), "train.steps", "train.batch_rows"),
}


def covers(names: Collection[str], key: str) -> bool:
    """True if `key` is among `names`, or in one of their sections or groups."""
    spread = [part for name in names for part in GROUPS.get(name, (name,))]
    return any(key == name or key.startswith(f"{name}.") for name in spread)


def compared_keys(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of the configs, and model.init.*, which older runs lack and had at their defaults."""
    keys = dict.fromkeys(key for config in configs for key in config) | dict.fromkeys(INIT_KEYS)
    return [key for key in keys if not covers(HARMLESS, key)]


def is_own_option(key: str) -> bool:
    shared = {field.name for field in fields(ModelConfig)}
    return key.startswith("model.") and key.removeprefix("model.").partition(".")[0] not in shared


def is_shared_option(key: str) -> bool:
    """True for an option of all architectures that is no size."""
    name = key.removeprefix("model.")
    return key.startswith("model.") and not is_own_option(key) and name not in (*SIZES, "name")


def is_of_training(key: str) -> bool:
    """True for keys of training and of first weights, in which a baseline could be tuned."""
    starts = key.startswith("model.") and key.endswith((".init", ".scale"))  # nGPT's vectors
    return starts or covers(("optim", "schedule", "train.batch_tokens", "model.init"), key)


class Absent:
    """Stands for a missing value: the architecture lacks the key, or the value is unknown."""

    def __init__(self, why: str) -> None:
        self.why = why


NO_SUCH_KEY, UNKNOWN = Absent("no such key"), Absent("does not say it")


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """The value of `key` in a config; if the config lacks it, the schema's default, NO_SUCH_KEY or UNKNOWN."""
    if key in config:
        return config[key]
    architecture = architectures().get(config.get("model.name", ModelConfig.name))
    known = schema_keys(architecture) if architecture else all_keys()
    if key not in known:
        return NO_SUCH_KEY if key in all_keys() else UNKNOWN
    return UNKNOWN if known[key].default == AUTO else known[key].default


def without_effect(config: Mapping[str, Any]) -> set[str]:
    """The keys of model.* and optim.* that other keys of a config leave without an effect, as rows of length 1 leave
    model.init.*; none if the architecture is not known."""
    architecture = architectures().get(config.get("model.name", ModelConfig.name))
    if architecture is None:
        return set()
    known = {name: key for name, key in schema_keys(architecture).items() if name.startswith(("model.", "optim."))}
    valid = {name: x for name, x in config.items() if name in known and known[name].problem(x) is None}
    built = build(valid, architecture)
    of_model = {f"model.{name}" for _, name in built.model.without_effect()}
    return of_model | {f"optim.{name}" for _, name in built.optim.without_effect()}


def brought(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key of model.*, optim.* or schedule.* in the run's architecture and recipe, with the run's
    optimizer, at its size and budget; else UNKNOWN."""
    sizes = [f"model.{name}" for name in ("d_model", "n_layers", "n_heads", "context")]
    numbers = {name: config[name] for name in (*sizes, "train.steps", "train.batch_rows") if name in config}
    name, scale = config.get("model.name", ModelConfig.name), config.get("scale.name")
    if key in numbers or not key.startswith(("model.", "optim.", "schedule.", "data.objective")):
        return UNKNOWN
    optimizer = None if key == "optim.name" else config.get("optim.name")
    try:
        found = _recipe(name, scale, optimizer, tuple(numbers.items()))
    except TypeError:  # a list instead of a number is not hashable
        found = None
    return UNKNOWN if found is None else found.get(key, NO_SUCH_KEY)


@cache
def _recipe(
    name: str, scale: str | None, optimizer: str | None, numbers: tuple[tuple[str, Any], ...]
) -> Mapping[str, Any] | None:
    """The config of `train model=NAME` with this optimizer, at this size and budget; None if it cannot be composed."""
    overrides = [f"model={name}", *(f"{key}={value}" for key, value in numbers)]
    of_scale = [] if scale is None else [f"scale={scale}"]
    chosen = [] if optimizer is None else [f"optim.name={optimizer}"]
    # An optimizer without decay refuses a recipe's; a plug-in's architecture may refuse an optimizer.
    for more in (chosen, [*chosen, "optim.weight_decay=0"], []):
        # The second is for a scale of the user's own, which is not found and has no learning rate in the table.
        for given, unknown in (([*of_scale, *overrides], ()), ([*overrides, "optim.lr=1"], ("optim.lr",))):
            with contextlib.suppress(ConfigError):
                found = dict(flatten(to_dict(load_config([*given, *more])), TABLES))
                return found | dict.fromkeys(unknown, UNKNOWN)
    return None


class Seen:
    """The values of one key, fact or quantity.

    by_arm[arm][budget]: list of values, as many as the runs gave.
    """

    def __init__(self, key: str, arms: Arms, values: Callable[[Run, str], list[Any]]) -> None:
        self.key, self.arms = key, arms
        self.by_arm: dict[str, dict[int, list[Any]]] = {}
        budgets = common_budgets(arms)
        for arm, runs in arms.items():
            of_arm = self.by_arm.setdefault(arm, {})
            for run in runs:
                if found := values(run, key):
                    of_arm.setdefault(budgets[run.path], []).extend(found)

    def of(self, arm: str) -> list[Any]:
        return distinct(itertools.chain.from_iterable(self.by_arm[arm].values()))

    def all(self) -> dict[str, list[Any]]:
        return {arm: self.of(arm) for arm in self.by_arm}

    @property
    def known(self) -> bool:
        return all(value is not UNKNOWN for values in self.all().values() for value in values)

    @property
    def arms_differ(self) -> bool:
        """True if two arms differ at a shared budget; or altogether, if they share none."""
        return any(
            identities(one[budget]) != identities(other[budget])
            for ones, others in itertools.combinations(self.by_arm.values(), 2)
            for one, other in [_comparable(ones, others)]
            for budget in one
        )

    def shown(self) -> tuple[dict[str, list[Any]], str]:
        """The values of each arm, and a remark. If arms differ at a budget but have the same values in all, the values
        of the largest such budget."""
        if _differ(self.all()):
            return self.all(), ""
        budgets = sorted({budget for of_arm in self.by_arm.values() for budget in of_arm}, reverse=True)
        for budget in budgets:
            found = {arm: distinct(of_arm[budget]) for arm, of_arm in self.by_arm.items() if budget in of_arm}
            if _differ(found):
                break
        return found, f"at {budget:,} tokens"


def _differ(values: Mapping[str, list[Any]]) -> bool:
    return len({frozenset(identities(found)) for found in values.values()}) > 1


def _comparable(one: Mapping[int, list[Any]], other: Mapping[int, list[Any]]) -> tuple[dict[int, list[Any]], ...]:
    """The values of two arms at their shared budgets; all values under budget 0, if they share none."""
    if shared := one.keys() & other.keys():
        return {budget: one[budget] for budget in shared}, {budget: other[budget] for budget in shared}
    return tuple({0: list(itertools.chain.from_iterable(found.values()))} for found in (one, other))


def identity(value: Any) -> Any:
    if isinstance(value, Absent):
        return id(value)
    return json.dumps(float(value) if type(value) is int else value, sort_keys=True, default=str)


def same(one: Any, other: Any) -> bool:
    return identity(one) == identity(other)


def identities(values: Iterable[Any]) -> set[Any]:
    return {identity(value) for value in values}


def distinct(values: Iterable[Any]) -> list[Any]:
    return list({identity(value): value for value in values}.values())


def ordered(values: list[Any]) -> list[Any]:
    """By size, if all are numbers."""
    return sorted(values) if all(type(value) in (int, float) for value in values) else values


def plain(value: Any) -> Any:
    """The value in JSON."""
    if isinstance(value, list):
        return [plain(x) for x in value]
    return None if isinstance(value, Absent) else value


def ratio(values: Iterable[Any]) -> float | None:
    """The largest value over the smallest; None unless all are positive numbers."""
    numbers = list(values)
    if not numbers or any(type(x) not in (int, float) or not 0 < x < math.inf for x in numbers):
        return None
    return float(max(numbers) / min(numbers))
