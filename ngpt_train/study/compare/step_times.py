"""The cost of a token in FLOPs and seconds, by optimizer steps of all arms that are timed in turn in one process, or by
the runs' own clocks, which depend on the load of the machine. step_times.json in the report's directory keeps the
times, so a comparison can be repeated."""

import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.schema import Config, check
from ngpt_train.config.stored import read_yaml
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import read_json
from ngpt_train.core.recorded import ABOVE_0, LIST, TABLE, TEXT, checked
from ngpt_train.study.compare.equal_loss import Ratio
from ngpt_train.study.compare.noise import t_quantile
from ngpt_train.study.compare.phrases import MEASURED, OWN
from ngpt_train.study.compare.runs import Arms, Run

STEP_TIMES = "step_times.json"  # in the directory of a report
ROUNDS = 10
WARM_UP = 3
# Keys that change the time of a step. A change makes stored times invalid.
_OF_A_STEP = ("model.", "train.batch_rows", "train.micro_rows", "train.precision", "train.compile", "optim.name")

Times = Mapping[str, Mapping[str, Any]]  # by arm, as `measure` returns them


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
            needed = {"seconds_per_token": LIST, "step_time": ABOVE_0}
            checked(of_arm, needed, where, tuple(needed))
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

    found: dict[str, dict[str, Any]] = {name: {"of": fingerprint(run)} for name, run in runs.items()}
    steps, on_cpu = {}, not torch.cuda.is_available()
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
            found[name]["untimed"] = f"The steps of {name} could not be timed here: {reason}"
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
    for name in steps:
        found[name] |= {"step_time": statistics.median(walls[name]), "seconds_per_token": taken[name]}
        found[name] |= {"tokens": tokens[name], "device": device}
    return found


@dataclass(frozen=True)
class Cost:
    """Of a baseline's token over an arm's. log_error: standard error of its logarithm, with `df` degrees of freedom."""

    ratio: float
    log_error: float = 0.0
    df: float = 1e6


def own_clock(arm: Sequence[Run], baseline: Sequence[Run]) -> Cost | None:
    """None if the records of one arm have no times."""
    logs = [np.log([s for run in runs if (s := run.seconds_per_token)]) for runs in (baseline, arm)]
    if not (len(logs[0]) and len(logs[1])):
        return None
    error = float(np.sqrt(sum(np.var(x, ddof=1) / len(x) for x in logs if len(x) > 1)))
    df = max(sum(len(x) - 1 for x in logs), 1)
    return Cost(float(np.exp(logs[0].mean() - logs[1].mean())), error, df)


def measured(step_times: Times, arm: str, baseline: str) -> Cost | None:
    """None if one of the two was not timed."""
    if arm not in step_times or baseline not in step_times:
        return None
    ones, others = (np.log(np.array(step_times[name]["seconds_per_token"])) for name in (baseline, arm))
    ratios = ones - others  # of the same round, so the load of the machine cancels
    error = float(np.std(ratios, ddof=1) / np.sqrt(len(ratios)))
    return Cost(float(np.exp(np.mean(ratios))), error, len(ratios) - 1)


def flops(arm: Sequence[Run], baseline: Sequence[Run]) -> Cost | None:
    found = [[x for run in runs if (x := run.flops_per_token)] for runs in (baseline, arm)]
    return Cost(statistics.fmean(found[0]) / statistics.fmean(found[1])) if found[0] and found[1] else None


Costs = dict[tuple[str, str | None], Cost]  # by unit and clock


def costs_between(arm: str, baseline: str, runs: Arms, step_times: Times) -> Costs:
    """The known costs. runs: by the name of the arm."""
    found = {
        ("tokens", None): Cost(1.0),
        ("flops", None): flops(runs[arm], runs[baseline]),
        ("seconds", MEASURED): measured(step_times, arm, baseline),
        ("seconds", OWN): own_clock(runs[arm], runs[baseline]),
    }
    return {unit: cost for unit, cost in found.items() if cost is not None}


def in_units(ratio: Ratio, cost: Cost, confidence: float) -> Ratio:
    """The ratio of tokens times the ratio of their costs; the two errors are independent."""
    if ratio.estimate is None:
        return Ratio(None, None, None, ratio.extrapolated, ratio.note)
    of_cost = float(t_quantile(confidence, cost.df)) * cost.log_error

    def end(value: float | None, side: int) -> float | None:
        if value is None or ratio.estimate is None:
            return None
        return cost.ratio * ratio.estimate * float(np.exp(side * np.hypot(np.log(value / ratio.estimate), of_cost)))

    return Ratio(cost.ratio * ratio.estimate, end(ratio.low, -1), end(ratio.high, 1), ratio.extrapolated, ratio.note)


def costs_of(name: str, runs: Sequence[Run], step_times: Times) -> dict[str, Any]:
    """The entry of the arm in `costs` of report.json."""
    memory = [x["memory_gb"] for run in runs for x in run.train if x.get("memory_gb") is not None]
    own = [x["step_time"] for run in runs for x in run.train if x.get("step_time") is not None]
    of_own = statistics.median(own) if own else None
    in_turn = step_times.get(name)
    counts = ("n_params", "n_params_without_embeddings", "flops_per_token")
    return {
        "arm": name,
        **{count: next((x for run in runs if (x := getattr(run, count)) is not None), None) for count in counts},
        "memory_gb": max(memory, default=None),
        "step_time": in_turn["step_time"] if in_turn else of_own,
        "step_time_how": MEASURED if in_turn else OWN if own else None,
        "step_time_own": of_own,
    }
