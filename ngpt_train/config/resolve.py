"""Fills in what `auto` and null stand for where the configuration alone decides it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ngpt_train.config.keys import AUTO, nearest_multiples
from ngpt_train.config.lr_table import Run, look_up
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.records import WandbConfig
from ngpt_train.config.validate import Origin, mistake, report_together


def resolve(config: Config, origins: Mapping[str, Origin], experiment: str | None = None) -> None:
    """Replaces, in place, optim.lr and lr_source, schedule.warmup_steps and final_lr, run.name, train.batch_rows and
    batch_tokens, eval.rows and tokens, model.n_kv_heads, d_mlp, logging.wandb.* and what depends on other keys by their
    values. Raises ConfigError where there is none. `origins` says of two keys which was set later, `experiment` which
    one was chosen."""
    model, optim = config.model, config.optim
    model.n_kv_heads = model.n_heads if model.n_kv_heads is None else model.n_kv_heads
    model.d_mlp = 4 * model.d_model if model.d_mlp is None else model.d_mlp
    _resolve_batch(config, origins)
    _resolve_validation(config, origins)
    if optim.lr == AUTO:
        optim.lr, optim.lr_source = table_lr(config)
    _resolve_final_lr(config, origins)
    _resolve_warmup(config, origins)
    if config.data.objective == AUTO:
        config.data.objective = model.objective
    model.settle_starts(model.measured_starts(config.scale.name))
    model.resolve(config)
    if config.run.name == AUTO:
        config.run.name = f"{model.name}-{config.scale.name}-seed{config.run.seed}"
    _resolve_wandb(config, experiment)


def auto_warmup(config: Config) -> int:
    return 0 if config.schedule.kind == "ramp" else min(2000, config.train.steps // 10)


def _resolve_warmup(config: Config, origins: Mapping[str, Origin]) -> None:
    """warmup_steps and warmup_tokens say the same thing; the one that was set last counts. Call after
    `_resolve_batch`."""
    schedule, train = config.schedule, config.train
    names = "schedule.warmup_steps schedule.warmup_tokens"
    steps, tokens = (origins[name].order for name in names.split())
    if schedule.warmup_tokens is not None and steps == tokens:
        raise report_together(config, (names, "both set the warmup", "Set one of them"), origins)
    if steps > tokens:
        schedule.warmup_tokens = None
    if schedule.warmup_tokens is not None:
        schedule.warmup_steps = -(-schedule.warmup_tokens // (train.rows_per_step * config.model.context))
    # A warmup belongs to the steps it was written for: where fewer were set later, it is auto.
    later = origins["train.steps"].order > max(steps, tokens)
    if schedule.warmup_steps == AUTO or (later and int(schedule.warmup_steps) >= train.steps):
        schedule.warmup_steps, schedule.warmup_tokens = auto_warmup(config), None


def _resolve_final_lr(config: Config, origins: Mapping[str, Origin]) -> None:
    """Of final_lr and final_share the one that was set last counts. Call when optim.lr is resolved."""
    schedule, names = config.schedule, "schedule.final_lr schedule.final_share"
    lr, share = (origins[name].order for name in names.split())
    if schedule.final_share is not None and lr == share:
        raise report_together(config, (names, "both set where the schedule ends", "Set one of them"), origins)
    if lr > share:
        schedule.final_share = None
    if schedule.final_share is not None:
        schedule.final_lr = schedule.final_share * float(config.optim.lr)


def _resolve_batch(config: Config, origins: Mapping[str, Origin]) -> None:
    """batch_rows and batch_tokens say the same thing; the one that was set last counts."""
    train, context = config.train, config.model.context
    names = "train.batch_rows train.batch_tokens"
    rows, tokens = (origins[name].order for name in names.split())
    if train.batch_rows is None and train.batch_tokens is None:
        fix = "Set one of them, for example train.batch_rows=16"
        raise report_together(config, (names, "no batch size", fix), origins)
    if train.batch_rows is not None and train.batch_tokens is not None:
        if rows == tokens:
            raise report_together(config, (names, "both set the batch size", "Set one of them"), origins)
        if rows > tokens:
            train.batch_tokens = None
    if train.batch_tokens is not None:
        if train.batch_tokens % context:
            fix = nearest_multiples("train.batch_tokens", train.batch_tokens, context)
            names, problem = "train.batch_tokens model.context", "the batch is no multiple of the row"
            raise report_together(config, (names, problem, fix), origins)
        train.batch_rows = train.batch_tokens // context
    train.batch_tokens = train.rows_per_step * context


def table_lr(config: Config) -> tuple[float, str]:
    """The learning rate of optim.lr_table for a config whose batch is resolved, and where it is from. Raises
    ConfigError where there is none."""
    row: dict[int, Any] | None = config.optim.lr_table.get(config.scale.name)
    if not row:
        scales = ", ".join(config.optim.lr_table) or "no scale"
        problem = f"the recipe's table has no learning rate for scale={config.scale.name}, only for {scales}"
        raise mistake(f"optim.lr=auto: {problem}", "Set optim.lr=NUMBER")
    train, context = config.train, config.model.context
    return look_up(row, Run(config.model.name, context, train.steps * train.rows_per_step * context, train.steps))


def _resolve_validation(config: Config, origins: Mapping[str, Origin]) -> None:
    """Of eval.rows and eval.tokens, which both say how much text a validation has, the one that was set last counts."""
    names = "eval.rows eval.tokens"
    of_rows, of_tokens = (origins[name].order for name in names.split())
    if config.eval.rows is None and config.eval.tokens is None:
        raise report_together(config, (names, "no validation set", "Set one, for example eval.rows=64"), origins)
    if config.eval.rows is not None and config.eval.tokens is not None:
        if of_rows == of_tokens:
            raise report_together(config, (names, "both set the validation set", "Set one of them"), origins)
        if of_rows > of_tokens:
            config.eval.tokens = None
        else:
            config.eval.rows = None


def wandb_mode(wandb: WandbConfig) -> str:
    """online, offline or disabled. What leaves the machine leaves it because somebody asked for it: `auto` is online
    only where the environment has WANDB_MODE, or a project or a team is named; a key alone asks for nothing."""
    if wandb.mode != AUTO:
        return wandb.mode
    if asked := os.environ.get("WANDB_MODE"):
        return {"disabled": "disabled", "offline": "offline", "dryrun": "offline"}.get(asked, "online")
    return "online" if wandb.project or wandb.entity else "disabled"


def _resolve_wandb(config: Config, experiment: str | None) -> None:
    """Fills in the name, group and tags that are null. The table of an experiment's row is a tag."""
    wandb, model, scale = config.logging.wandb, config.model.name, config.scale.name
    wandb.name = config.run.name if wandb.name is None else wandb.name
    wandb.group = (experiment or scale) if wandb.group is None else wandb.group
    if wandb.tags is None:
        table = [experiment.rpartition("/")[0] or experiment] if experiment else []
        wandb.tags = [model, scale, *table]
