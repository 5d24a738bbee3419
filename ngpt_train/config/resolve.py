"""Checks keys together, and fills in what `auto` and null stand for where the configuration alone decides it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ngpt_train.config.data_conflicts import data_conflicts
from ngpt_train.config.keys import AUTO, Conflict, nearest_divisors
from ngpt_train.config.schema import Config
from ngpt_train.config.validate import report, show
from ngpt_train.core.errors import ConfigError

# One level of directories: multirun numbers its jobs <name>/<k>.
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")


class Origin(NamedTuple):
    """Where a key was set: `in FILE`, or empty for the command line. The larger `order` was applied later."""

    order: int
    place: str


def resolve(config: Config, origins: Mapping[str, Origin] | None = None) -> None:
    """Replaces, in place, optim.lr, schedule.warmup_steps, run.name, train.batch_rows and batch_tokens,
    model.n_kv_heads, d_mlp and what depends on other keys by their values. Raises ConfigError where there is none."""
    origins = origins or {}
    model, optim = config.model, config.optim
    model.n_kv_heads = model.n_heads if model.n_kv_heads is None else model.n_kv_heads
    model.d_mlp = 4 * model.d_model if model.d_mlp is None else model.d_mlp
    _resolve_batch(config, origins)
    if optim.lr == AUTO:
        optim.lr = _table_lr(config)
    _resolve_warmup(config, origins)
    if config.data.objective == AUTO:
        config.data.objective = model.objective
    model.resolve(config)
    if config.run.name == AUTO:
        config.run.name = f"{model.name}-{config.scale.name}-seed{config.run.seed}"


def auto_warmup(steps: int) -> int:
    return min(2000, steps // 10)


def check(config: Config, world_size: int | None = None, origins: Mapping[str, Origin] | None = None) -> None:
    """Raises ConfigError for values that exclude each other. `config` is resolved; `world_size` is the
    number of ranks, by default torchrun's."""
    world_size = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    for names, problem, fix in _conflicts(config, world_size):
        raise _error(config, names, problem, fix, origins or {})


def check_verb(config: Config, verb: str) -> None:
    """Raises ConfigError for what `verb` cannot do without, or cannot write to."""
    if verb in ("generate", "evaluate") and getattr(config, verb).checkpoint is None:
        raise ConfigError(
            f"{verb}.checkpoint=null: no checkpoint is named\n  For example {verb}.checkpoint=runs/quickstart"
        )
    if verb == "prepare" and config.data.kind in ("tokens", "mixture"):
        problem = "nothing to prepare" if config.data.kind == "tokens" else "one source at a time is prepared"
        raise ConfigError(f"data.kind={config.data.kind}: {problem}\n  Choose text: data=embedded, local or hf")
    if verb == "plan":
        check(config, config.plan.world_size)
    out = getattr(getattr(config, verb), "out", None) if verb in ("plan", "evaluate", "bench") else None
    if out is not None:
        path = Path(out).expanduser()
        if path.is_dir():
            raise ConfigError(f"{verb}.out={out}: is a directory\n  Name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{verb}.out={out}: {path.parent} is not a directory\n  Create it, or name another file")
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            problem, fix = f"{path.parent} cannot be written ({error.strerror})", "Name a file where you may write"
            raise ConfigError(f"{verb}.out={out}: {problem}\n  {fix}") from None


def _conflicts(config: Config, world_size: int) -> Iterator[Conflict]:
    """(keys, what is wrong, how to fix it) for each rule that is broken."""
    run, model, train, optim = config.run, config.model, config.train, config.optim
    warmup, lr, n_kv_heads = config.schedule.warmup_steps, optim.lr, model.n_kv_heads
    assert isinstance(warmup, int)
    assert isinstance(lr, float)
    assert isinstance(n_kv_heads, int)

    if not _RUN_NAME.fullmatch(run.name):
        yield (
            ("run.name",),
            "not a directory name",
            "Letters, digits, '.', '_' and '-', at most one '/', no part that begins with '.' or '-'",
        )
    if run.overwrite and run.resume == "must":
        yield (
            ("run.overwrite", "run.resume"),
            "overwriting deletes the run that must be resumed",
            "Keep one of them",
        )

    if config.logging.tensorboard and find_spec("tensorboard") is None:
        yield (
            ("logging.tensorboard",),
            "the package tensorboard is not installed",
            "pip install 'ngpt-train[tensorboard]', or set logging.tensorboard=false",
        )

    heads = ("model.n_heads", "model.d_model")
    if model.d_model % model.n_heads:
        yield (
            heads,
            "the heads do not divide the width",
            nearest_divisors("model.n_heads", model.n_heads, model.d_model),
        )
    if model.uses_rope and (model.d_model // model.n_heads) % 2:
        width = 2 * model.n_heads * max(1, round(model.d_model / model.n_heads / 2))
        yield (
            heads,
            f"RoPE needs an even width of each head, this is {model.d_model // model.n_heads}",
            f"For example model.d_model={width}",
        )
    if model.n_heads % n_kv_heads:
        yield (
            ("model.n_kv_heads", "model.n_heads"),
            "the key/value heads do not divide the heads",
            nearest_divisors("model.n_kv_heads", n_kv_heads, model.n_heads),
        )

    for switch, name in model.without_effect():
        default = reduce(getattr, name.split("."), type(model)())
        if reduce(getattr, name.split("."), model) not in (default, 0 if default == AUTO else default):
            key, fix = f"model.{name}", f"Leave it out, or set model.{name}={show(default)}"
            yield (key, f"model.{switch}"), f"{key} has no effect then", fix

    yield from _batch_conflicts(config, world_size)
    if train.cuda_graphs:
        yield from _cuda_graph_conflicts(config, world_size)
    if train.stop_at is not None and train.stop_at > train.steps:
        yield ("train.stop_at", "train.steps"), "stops after the end", f"Set train.stop_at to {train.steps} or less"
    if warmup >= train.steps:
        yield (
            ("schedule.warmup_steps", "train.steps"),
            "the warmup leaves no step at the full learning rate",
            f"Set schedule.warmup_steps below {train.steps}; auto would be {auto_warmup(train.steps)}",
        )
    yield from model.conflicts(config)
    if config.schedule.final_lr > lr:
        yield ("schedule.final_lr", "optim.lr"), "ends above the peak", f"Set schedule.final_lr to {lr} or less"

    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield ("optim.betas",), "not two numbers >= 0 and < 1", "For example optim.betas=[0.9,0.95]"
    if optim.weight_decay and optim.name == "adam":
        yield (
            ("optim.weight_decay", "optim.name"),
            "adam never decays",
            "Set optim.name=adamw or optim.weight_decay=0",
        )

    if config.parallel.kind == "single" and world_size > 1:
        yield (
            ("parallel.kind",),
            f"one process, but there are {world_size} ranks",
            "Set parallel=auto, ddp or fsdp, or use one rank",
        )
    yield from data_conflicts(config)
    keep, every = config.checkpoint.keep_every, config.checkpoint.every
    if keep is not None and (every == 0 or keep % every):
        multiple = f"Set checkpoint.keep_every to a multiple of {every}" if every else "Set checkpoint.every"
        yield ("checkpoint.keep_every", "checkpoint.every"), "no checkpoint is written at these steps", multiple


def _cuda_graph_conflicts(config: Config, world_size: int) -> Iterator[Conflict]:
    """What CUDA graphs need, and what distributed/cuda_graphs.py has not thought through."""
    kind, without = config.parallel.kind, "or train.cuda_graphs=false"
    if config.train.device == "cpu":
        fix = f"Set train.device=cuda, {without}"
        yield ("train.cuda_graphs", "train.device"), "CPUs have no CUDA graphs", fix
    if config.train.compile is False:
        fix = f"Set train.compile=true, {without}"
        yield ("train.cuda_graphs", "train.compile"), "only compiled blocks are recorded", fix
    if kind in ("ddp", "fsdp") or world_size > 1:
        problem = "only one process, without DDP and FSDP2" + (
            f", and there are {world_size}" if world_size > 1 else ""
        )
        yield ("train.cuda_graphs", "parallel.kind"), problem, f"Use one rank and parallel=single, {without}"


def _batch_conflicts(config: Config, world_size: int) -> Iterator[Conflict]:
    rows, micro = config.train.batch_rows, config.train.micro_rows
    assert rows is not None
    ranks = f"{world_size} ranks" if world_size > 1 else "one rank"
    names: tuple[str, ...]
    if isinstance(micro, int) and rows % (micro * world_size):
        names, unit = ("train.batch_rows", "train.micro_rows"), micro * world_size
        problem = f"the batch is no multiple of {micro} rows on {ranks}"
    elif rows % world_size:
        names, unit = ("train.batch_rows",), world_size
        problem = f"the batch cannot be shared evenly by {ranks}"
    else:
        return
    below, above = rows // unit * unit, (rows // unit + 1) * unit
    fix = f"The nearest train.batch_rows that work: {f'{below} or ' if below else ''}{above}"
    if isinstance(micro, int) and rows % world_size == 0:
        fix = f"{nearest_divisors('train.micro_rows', micro, rows // world_size)}\n  {fix}"
    yield names, problem, fix


def _resolve_batch(config: Config, origins: Mapping[str, Origin]) -> None:
    """batch_rows and batch_tokens say the same thing; the one that was set last counts."""
    train, context = config.train, config.model.context
    names = ("train.batch_rows", "train.batch_tokens")
    rows, tokens = (origins.get(name, Origin(-1, "")) for name in names)
    if train.batch_rows is None and train.batch_tokens is None:
        raise _error(config, names, "no batch size", "Set one of them, for example train.batch_rows=16", origins)
    if train.batch_rows is not None and train.batch_tokens is not None:
        if rows.order == tokens.order:
            raise _error(config, names, "both set the batch size", "Set one of them", origins)
        if rows.order > tokens.order:
            train.batch_tokens = None
    if train.batch_tokens is not None:
        if train.batch_tokens % context:
            below, above = train.batch_tokens // context * context, (train.batch_tokens // context + 1) * context
            raise _error(
                config,
                ("train.batch_tokens", "model.context"),
                "the batch is no multiple of the row",
                f"The nearest train.batch_tokens that work: {f'{below} or ' if below else ''}{above}",
                origins,
            )
        train.batch_rows = train.batch_tokens // context
    assert train.batch_rows is not None
    train.batch_tokens = train.batch_rows * context


def _resolve_warmup(config: Config, origins: Mapping[str, Origin]) -> None:
    """A warmup belongs to the steps it was written for: where fewer were set later, it is auto."""
    schedule, steps = config.schedule, config.train.steps
    names = ("schedule.warmup_steps", "train.steps")
    warmup_origin, steps_origin = (origins.get(name, Origin(-1, "")) for name in names)
    if schedule.warmup_steps == AUTO or (
        steps_origin.order > warmup_origin.order and int(schedule.warmup_steps) >= steps
    ):
        schedule.warmup_steps = auto_warmup(steps)


def _table_lr(config: Config) -> float:
    row: dict[int, float] | None = config.optim.lr_table.get(config.scale.name)
    if not row:
        scales = ", ".join(config.optim.lr_table) or "no scale"
        raise ConfigError(
            f"optim.lr=auto: the recipe's table has no learning rate for scale={config.scale.name}, only for {scales}"
            "\n  Set optim.lr=NUMBER"
        )
    within = [context for context in row if context <= config.model.context]
    return float(row[max(within) if within else min(row)])


def _error(
    config: Config, names: tuple[str, ...], problem: str, fix: str, origins: Mapping[str, Origin]
) -> ConfigError:
    def value(name: str) -> Any:
        return reduce(getattr, name.split("."), config)

    lines = [f"{', '.join(f'{name}={show(value(name))}' for name in names)}: {problem}", fix]
    lines += [f"{name} is set {origins[name].place}" for name in names if name in origins and origins[name].place]
    return ConfigError(report(lines))
