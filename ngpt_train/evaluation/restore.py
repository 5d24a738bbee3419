"""Loads a trained model and its tokenizer from a checkpoint, or the mean of the weights of several."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.architectures import all_keys
from ngpt_train.config.keys import AUTO
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config, TrainConfig, build
from ngpt_train.config.stored import read_yaml, what_differs
from ngpt_train.config.validate import check_leaf, check_leaves, mistake, show
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import read_json
from ngpt_train.data.tokenizers import read_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.layouts import choose_kernels, resolve_precision
from ngpt_train.distributed.world import World, resolve_device
from ngpt_train.evaluation.continued_prompts import Texts
from ngpt_train.evaluation.sampling import opened
from ngpt_train.models import build_model
from ngpt_train.models.decoder import Decoder
from ngpt_train.report.enough_memory import check_weights_fit
from ngpt_train.training.checkpoint.catalogue import find_checkpoint, list_checkpoints, read_progress, step_of
from ngpt_train.training.checkpoint.load import load_model, open_tensors

logger = logging.getLogger(__name__)

# The checkpoint decides these sections. The value is the key that an override of the whole group sets, as model=gpt.
DECIDED_BY_CHECKPOINT = {"model": "name", "scale": "name", "tokenizer": "kind", "optim": "name", "schedule": "kind"}
# Every verb that restores a model reads these keys and sections, beside its own section.
USED = ("train.device", "train.precision", "kernels")
# The keys of `generate` for sampling.
OPTIONS = {
    f"generate.{name}"
    for name in (
        *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        *("no_repeat_ngram_size", "stop", "seed", "cache", "overflow"),
    )
}


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the config of its run."""

    path: Path
    config: Config
    averaged: tuple[Path, ...] = ()  # checkpoints for a mean of weights, the oldest first
    weights: str = "trained"  # or ema

    @property
    def averaged_steps(self) -> tuple[int, ...]:
        return tuple(map(step_of, self.averaged))

    @property
    def of_what(self) -> str:
        """Describes a mean or a moving average of weights; empty for the trained weights of one checkpoint."""
        if self.averaged_steps:
            return f"mean of the weights at steps {', '.join(map(str, self.averaged_steps))}"
        return "moving average of the weights" if self.weights == "ema" else ""


@dataclass(frozen=True, kw_only=True)
class Restored(Trained):
    """A checkpoint with its model and tokenizer, without the optimizer."""

    step: int
    model: Decoder
    tokenizer: Tokenizer

    def tokens(self, text: str) -> Tensor:
        """The ids `(T,)` of a text as the model reads it: a decoder with an eos in front. `model(tokens[None])` gives a
        decoder's logits `(1, T, V)`."""
        return opened(self.model, self.tokenizer, self.tokenizer.encode(text).tolist())

    def generate(self, prompt: str, **options: Any) -> str:
        """Continues a prompt. options: keys of `generate` from OPTIONS, such as max_new_tokens=50, temperature=0.
        Raises ConfigError for another key or a wrong value, and for a model that continues no text."""
        if problem := self.config.model.refuses_text():
            raise ConfigError(f"{self.path}: {problem}")
        keys = {name: key for name, key in all_keys().items() if name in OPTIONS}
        values = {f"generate.{name}": value for name, value in options.items()}
        check_leaves(values, keys)
        config = build(values, type(self.config.model)).generate
        config.check_texts()
        (text,) = Texts(self.model, self.tokenizer, config).of([prompt])
        return text.text


def check_size(checkpoint: Path, model: ModelConfig) -> None:
    """Raises DataError if the checkpoint's tensors are too few for the config: a forged one could take all memory."""
    if model.vocab_size == AUTO:
        raise DataError(f"{checkpoint / 'config.yaml'}: model.vocab_size=auto, but a checkpoint has its number")
    sizes = open_tensors(checkpoint).sizes()
    needed = f"model.n_layers={model.n_layers}"
    if model.n_layers <= len(sizes):
        with torch.device("meta"):
            n_params = sum(parameter.numel() for parameter in build_model(model).parameters())
        needed = f"a model of {n_params:,} parameters"
        if n_params <= sum(sizes):
            return
    has = f"{len(sizes):,} tensors of {sum(sizes):,} numbers"
    raise DataError(f"{checkpoint / 'config.yaml'}: {needed}, but the checkpoint has {has}. Use another checkpoint.")


def find_trained(verb: str, config: Config, overrides: Sequence[str], also_used: Collection[str] = ()) -> Trained:
    """Finds the checkpoint of `<verb>.checkpoint`. Touches neither data nor devices.

    overrides: the command line. also_used: sections and keys that the verb reads, beside its own section and USED.
    Raises as `named` and `check_overrides`.
    """
    own = getattr(config, verb)
    trained = named(verb, "checkpoint", own.checkpoint, own)
    check_overrides(verb, [trained], config, overrides, also_used)
    return trained


def named(verb: str, key: str, value: str | None, own: Any) -> Trained:
    """Finds the checkpoint of `<verb>.<key>=<value>`. own: the verb's section, for `average` and `weights`. Raises
    DataError without a checkpoint, or with too few for an average; ConfigError without a moving average."""
    path = find_checkpoint(f"{verb}.{key}", value)
    stored = read_yaml(path / "config.yaml")
    if own.weights == "ema" and stored.optim.ema_decay is None:
        problem = f"{verb}.weights=ema: the run of {path} keeps no moving average (optim.ema_decay=null)"
        raise mistake(problem, f"Leave it out, try {verb}.average=K, or train a run with optim.ema_decay=0.999")
    averaged = newest(f"{verb}.average", own.average, path, stored) if own.average > 1 else ()
    return Trained(path, stored, tuple(averaged), own.weights)


def check_overrides(
    verb: str, trained: Sequence[Trained], config: Config, overrides: Sequence[str], also_used: Collection[str]
) -> None:
    """Raises ConfigError for an override that contradicts a checkpoint; logs unused ones. Arguments: `find_trained`."""
    used, unused = {verb, "experiment", *USED, *also_used}, []
    for override in overrides:
        name, _, value = (part.strip() for part in override.partition("="))
        section = name.partition(".")[0]
        if section in DECIDED_BY_CHECKPOINT:
            key = name if "." in name else f"{name}.{DECIDED_BY_CHECKPOINT[name]}"
            for each in trained:
                found = _value(each.config, key)
                if value != AUTO and _value(config, key) != found:
                    problem = f"{override}: the checkpoint decides, and in {each.path} {key} is {found}"
                    raise mistake(problem, "Leave it out, or name another checkpoint")
        elif not used & {name, section}:
            unused.append(name)
    if unused:
        logger.info("%s makes no use of %s", verb, ", ".join(unused))


def _value(config: Config, key: str) -> Any:
    """None for a key of another architecture."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def restore_here(run: str | Path, device: str) -> Restored:
    """Restores a checkpoint, or the newest one of a run, for evaluation in this process."""
    check_leaf("train.device", device, all_keys())
    path = find_checkpoint("load", str(run))
    stored = read_yaml(path / "config.yaml")
    config = Config(model=stored.model, train=TrainConfig(device=device))
    restored = restore(Trained(path, stored), config, World(0, 1, 0, resolve_device(device, local_rank=0)))
    restored.model.eval()
    return restored


def restore(trained: Trained, config: Config, world: World) -> Restored:
    """Loads the model of a checkpoint, unsharded, on this rank's device, with kernels and precision of `config`. A
    collective call. Raises DataError if the checkpoint is damaged, ConfigError if the kernels cannot run."""
    path = trained.path
    check_size(path, trained.config.model)
    check_weights_fit(path, trained.config.model, world.device)
    precision = resolve_precision(config.train.precision, world.device.type)
    choose_kernels(replace(config, model=trained.config.model), world.device, precision)
    with world.device:
        model = build_model(trained.config.model)
    model.compute_dtype = precision
    if trained.averaged:
        load_mean(trained.averaged, model, world)
    elif trained.weights == "ema":
        load_model(path, model, world, "ema")
        model.project_()  # the mean of points on the sphere lies inside it
    else:
        load_model(path, model, world)
    tokenizer = read_tokenizer(path, read_json(path / "tokenizer.json"))
    if trained.of_what:
        logger.info("weights: %s", trained.of_what)
    step = read_progress(path)["step"]  # the directory may have been renamed
    return Restored(**vars(trained), step=step, model=model, tokenizer=tokenizer)


def newest(key: str, n: int, last: Path, config: Config) -> list[Path]:
    """The `n` newest checkpoints of a run up to `last`, the oldest first. key: the name in messages. config: of `last`.
    Raises DataError if there are fewer, or if a config or tokenizer differs, as in a directory of several runs."""
    last = last.resolve()  # it may be `.` or a link
    there = list_checkpoints(last.parent)
    if last not in there:
        raise DataError(f"{key}={n}: {last} does not have a run's name step_*, so the order of checkpoints is unknown.")
    found = there[: there.index(last) + 1][-n:]
    if len(found) < n:
        steps = ", ".join(str(step_of(path)) for path in found)
        raise DataError(
            f"{key}={n}: {last.parent} has {len(found)} up to step {step_of(last)} ({steps}). This run keeps "
            f"checkpoint.keep_last={config.checkpoint.keep_last}. Set {key}={len(found)}, or train with "
            f"checkpoint.keep_last={n}, which a resumed run may change."
        )
    for path in found[:-1]:
        differences = [
            f"{name}: {show(old)} in {path.name}, {show(new)} in {last.name}"
            for name, old, new in what_differs(read_yaml(path / "config.yaml"), config)
        ]
        if read_json(path / "tokenizer.json") != read_json(last / "tokenizer.json"):
            differences.append(f"{path.name} has another tokenizer than {last.name}")
        if differences:
            raise DataError(f"{key}={n}: {last.parent} holds several runs.\n  " + "\n  ".join(differences))
    return found


@torch.no_grad()
def load_mean(checkpoints: Sequence[Path], model: Decoder, world: World) -> None:
    """Loads the mean of the checkpoints' weights and running statistics into `model`.

    The sums are in fp64. Then the mean is projected onto the sphere: the nearest point has the least sum of squared
    distances to the checkpoints' rows. PowerNorm averages psi^2, BatchNorm mean and variance. A collective call. Raises
    DataError as `load_model`.
    """
    totals: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        load_model(checkpoint, model, world)
        for name, value in values_of(model).items():
            totals[name] = totals[name].add_(value) if name in totals else value.double()
    for name, value in values_of(model).items():
        value.copy_(totals[name] / len(checkpoints))
    model.project_()


def values_of(model: Decoder) -> dict[str, Tensor]:
    """Weights and running statistics, by name."""
    return {**dict(model.named_parameters()), **model.statistics()}
