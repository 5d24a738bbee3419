"""Optimizer steps of all arms, timed in turn in one process: the runs' own clocks depend on the load of the machine.
step_times.json in the report's directory keeps them, so a comparison can be repeated."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import Config, check
from ngpt_train.config.stored import read_yaml
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import read_json
from ngpt_train.core.recorded import ABOVE_0, LIST, TABLE, TEXT, checked
from ngpt_train.study.compare.clocks import STEP_TIMES
from ngpt_train.study.compare.runs import Run

ROUNDS = 10
WARM_UP = 3
# Keys that change the time of a step. A change makes stored times invalid.
_OF_A_STEP = ("model.", "train.batch_rows", "train.micro_rows", "train.precision", "train.compile", "optim.name")

Times = dict[str, dict[str, Any]]


def fingerprint(run: Run) -> str:
    """A hash of the keys that change the time of a step."""
    keys = {key: value for key, value in run.config.items() if key.startswith(_OF_A_STEP)}
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()[:16]


def stored(out: Path, runs: Mapping[str, Run]) -> Times:
    """Step times of these arms from an earlier comparison in `out`. runs: one of each arm."""
    if not (out / STEP_TIMES).exists():
        return {}
    of_arms = checked(read_json(out / STEP_TIMES), {"arms": TABLE}, str(out / STEP_TIMES), ["arms"])["arms"]
    times = checked(of_arms, {"": TABLE}, f"{out / STEP_TIMES}: arms")
    found = {name: times[name] for name, run in runs.items() if (times.get(name) or {}).get("of") == fingerprint(run)}
    for name, of_arm in found.items():
        where = f"{out / STEP_TIMES}: {name}"
        if checked(of_arm, {"untimed": TEXT}, where).get("untimed") is None:
            checked(
                of_arm, {"seconds_per_token": LIST, "step_time": ABOVE_0}, where, ("seconds_per_token", "step_time")
            )
            of_rounds = {f"seconds_per_token[{n}]": seconds for n, seconds in enumerate(of_arm["seconds_per_token"])}
            checked(of_rounds, {"": ABOVE_0}, where, tuple(of_rounds))
    return found


def measure(runs: Mapping[str, Run], own: Config, rounds: int = ROUNDS) -> Times:
    """Times a step of each arm on random tokens on this machine, once in every round.

    runs: one of each arm. own: the config of the command line, for keys that a run may not set here.

    Returns by arm `of` (fingerprint), `seconds_per_token` of the rounds (CPU time on a CPU, because other processes
    disturb wall-clock time), `step_time` (wall clock, median, in seconds), `tokens` of a step, `device`; or `untimed`,
    a sentence, if the arm could not be timed.
    """
    import torch

    from ngpt_train.evaluation import trust
    from ngpt_train.study.random_steps import steps_of, with_vocabulary
    from ngpt_train.training.state import build_state

    steps, untimed, on_cpu = {}, {}, not torch.cuda.is_available()
    for name, run in runs.items():
        try:
            config = read_yaml(run.path / "config.yaml")
            config.parallel.kind = "single"
            check(config, world_size=1)
            state = build_state(with_vocabulary(trust.taken(config, own, (), opens=())))
            on_cpu = state.world.device.type == "cpu"
            steps[name] = steps_of(state)
            for _ in range(WARM_UP):
                steps[name]()
        except (ConfigError, DataError, RuntimeError, ValueError, TypeError) as error:
            steps.pop(name, None)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            untimed[name] = f"The steps of {name} could not be timed here: {reason}"
    clock = time.process_time if on_cpu else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in steps}
    walls: dict[str, list[float]] = {name: [] for name in steps}
    tokens: dict[str, float] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            wall, started = time.perf_counter(), clock()
            tokens[name] = step()
            taken[name].append((clock() - started) / tokens[name])
            walls[name].append(time.perf_counter() - wall)
    device = "cpu" if on_cpu else torch.cuda.get_device_name()
    return {
        name: {"of": fingerprint(run), "untimed": untimed[name]}
        if name in untimed
        else {
            "of": fingerprint(run),
            "step_time": statistics.median(walls[name]),
            "seconds_per_token": taken[name],
            "tokens": tokens[name],
            "device": device,
        }
        for name, run in runs.items()
    }
