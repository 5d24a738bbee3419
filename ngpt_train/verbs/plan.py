"""`plan`: parameters, memory, FLOPs and hours of a run, without training and without a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.core.files import write_json
from ngpt_train.report.launch_plan import describe_plan, make_plan, planned_vocabulary


def main(config: Config, overrides: Sequence[str], options: Sequence[str] = ()) -> int:
    """Prints the plan, and writes it to plan.out as JSON; returns 0. Raises ConfigError for what does not fit
    plan.world_size ranks, DataError where a tokenizer's file is missing."""
    if config.model.vocab_size == AUTO:
        config = replace(config, model=replace(config.model, vocab_size=planned_vocabulary(config)))
    plan = make_plan(config, overrides, options)
    print(describe_plan(plan))
    if config.plan.out is not None:
        out = Path(config.plan.out).expanduser()
        write_json(out, plan)
        print(f"\nwritten to {out}")
    return 0
