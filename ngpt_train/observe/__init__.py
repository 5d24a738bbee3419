"""Observing a run: its speed and its records, and the sinks for them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import to_dict
from ngpt_train.core.recorded import Record, Sink
from ngpt_train.observe.console import Clock, LogFile, console_sink
from ngpt_train.observe.sinks import JsonlSink, TensorboardSink
from ngpt_train.observe.wandb_sink import WandbSink


def build_sinks(
    config: Config, run_dir: Path, run_info: Record, resume_step: int | None, rollbacks: Sequence[Record] = ()
) -> list[Sink]:
    """The sinks of a run, for rank 0. They are called and closed in this order.

    run_info: this start's entry in run.json; wandb shows it beside the config. resume_step: the step of the checkpoint
    on a resume; None for a new run. rollbacks: from run.json.
    """
    metrics = JsonlSink(run_dir / "metrics.jsonl", resume_step, len(rollbacks))
    clock = partial(Clock, config.train.steps, config.train.stop_at)  # each sink has its own clock
    people: list[Sink] = [console_sink(clock(), resume_step), LogFile(run_dir / "logs" / "rank_0.log", clock())]

    def say(text: str) -> None:
        for sink in people:
            sink.message(text)

    if metrics.dropped:
        say(
            f"{metrics.path}: cut off {metrics.dropped} lines that an earlier start wrote after step {resume_step or 0}"
        )
    sinks: list[Sink] = [metrics]
    if config.logging.tensorboard:
        sinks.append(TensorboardSink(run_dir / "tensorboard", resume_step))
    mode = config.logging.wandb.used_mode
    if mode != "disabled":
        shown: dict[str, Any] = {"config": {**to_dict(config), "run_info": run_info}, "summary": {}}
        if rollbacks:
            shown["config"]["rollbacks"] = list(rollbacks)
            shown["summary"]["rollbacks"] = len(rollbacks)
        if damaged := run_info.get("damaged"):
            problems = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
            shown["summary"]["fallback"] = f"the run goes on from step {run_info['step']}; {problems}"
        sinks.append(WandbSink(config.logging.wandb, mode == "online", run_dir, shown, say))
    elif config.logging.wandb.mode == AUTO:
        say("wandb: off (logging.wandb.mode=online, logging.wandb.project=NAME or WANDB_MODE=online turn it on)")
    return [*sinks, *people]
