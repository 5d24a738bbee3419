"""The cost of a study: runs, tokens, FLOPs by the formulas of `plan`, and hours by a step timed here."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log2
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config
from ngpt_train.core.launcher import end_with_parent
from ngpt_train.observe.console import format_count
from ngpt_train.study.definition import LR, Study
from ngpt_train.study.points import DONE, Point, Result, Results, Runs
from ngpt_train.study.search import next_points, phases

MEASURE_SECONDS = 300.0  # for all arms; arms not timed by then have no hours
TOKENS = 16_384  # of a micro batch at most, as with train.micro_rows=auto
_ROUNDS = 3
_MOST_FLOPS = {"cpu": 1e12, "cuda": 1e15}  # of a timed step, which has as many rows as fit
_HARD_FLOPS = {"cpu": 2e13, "cuda": 1e17}  # of a timed row; a model above is not timed


@dataclass(frozen=True)
class ArmSize:
    """The size of an arm's model, and its seconds per token if it was timed."""

    n_params: int
    flops_per_token: int  # forward and backward
    seconds_per_token: float | None
    why_not: str  # the reason why it was not timed


@dataclass(frozen=True)
class Cost:
    """A line of the table: the runs of an arm at a budget."""

    arm: str
    budget: int
    steps: int
    tokens: int  # of a run, whole steps
    runs: int  # expected
    most_runs: int
    flops: float  # of all expected runs
    hours: float | None  # of one run


def costs(study: Study, runs: Runs, sizes: Mapping[str, ArmSize], near: Results) -> list[Cost]:
    """The lines of the table. Rehearsals with made-up losses count the runs: `near`, and one far from the optimum."""
    rehearsals = (near, rehearsal(study, runs, far=True))
    expected, most = (Counter((point.arm, point.budget) for point in made) for made in rehearsals)
    lines = []
    for (arm, size), budget in product(sizes.items(), study.budgets):
        config, n = runs.config(runs.first_point(arm, budget)), expected[arm, budget]
        tokens = config.train.steps * config.train.rows_per_step * config.model.context
        flops, seconds = float(tokens) * size.flops_per_token, size.seconds_per_token
        if (rate := config.plan.flops_per_s) is not None:
            seconds = size.flops_per_token / rate
        hours = None if seconds is None else seconds * tokens / 3600
        lines.append(Cost(arm, budget, config.train.steps, tokens, n, max(n, most[arm, budget]), n * flops, hours))
    return lines


def rehearsal(study: Study, runs: Runs, far: bool = False) -> dict[Point, Result]:
    """All runs of the study, if the losses have their lowest point where each search begins, or far from there."""
    results: dict[Point, Result] = {}
    while wanted := next_points(study, runs.start, runs.grids, results):
        for point in wanted:
            first = study.search_order[0]
            grids, start = runs.grids(point.arm, first), dict[str, Any](runs.first_point(point.arm, first).values)
            start[LR], values = runs.start(point.arm, point.budget), dict[str, Any](point.values)
            octaves = [log2(values[k] / start[k]) for k in (LR, *grids) if k == LR or grids[k].outward]
            listed = [(values[k], grid.values) for k, grid in grids.items() if not grid.outward]
            octaves += [of.index(value) for value, of in listed if value in of]  # a carried warm-up is no longer in it
            loss = 9 + 0.05 * sum(-x if far else x**2 for x in octaves) + 0.003 * study.seeds.index(point.seed)
            results[point] = Result(point, DONE, loss, "", Path())
    return results


def cost_of_phases(study: Study, runs: Runs, near: Results) -> str:
    """The phases of each arm at the first budget, if no key gains; empty without further keys. near: a rehearsal."""
    budget = study.search_order[0]
    found = phases(study, runs.start, runs.grids, near)
    at_first = {arm: of for (arm, at), of in found.items() if at == budget}
    lines = [f"  {arm}: {'; '.join(f'{phase.key} {phase.runs}' for phase in of)}" for arm, of in at_first.items()]
    where = "" if study.descent_budget else ", and likewise at the others"
    first = f"Runs of each phase at {format_count(budget)} tokens{where}, if no key gains. A key that gains takes "
    first += "more of its values and seeds, and another cycle through rate and keys"
    first += f", up to {study.descent_runs} runs of an arm." if study.descent_runs else "."
    if study.descent_budget and study.descent_budget < (largest := max(study.budgets)):
        first += f" At other budgets these keys are not tuned, so the verdict at {format_count(largest)} is `untuned`."
    return "\n".join([first, *lines]) if lines else ""


def measure(configs: Mapping[str, Config], threads: int, here: bool = True) -> dict[str, ArmSize]:
    """The sizes of the arms, timed in turn in a separate process; not timed unless `here`. threads: of a run."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_measure, args=(dict(configs), threads, here, sender), daemon=True)
    worker.start()
    sender.close()
    found: dict[str, ArmSize] = {}
    deadline = time.monotonic() + MEASURE_SECONDS
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            name, size = receiver.recv()
            if isinstance(size, Exception):
                raise size
            found[name] = size
    except EOFError:
        pass
    finally:
        worker.kill()
        worker.join()
    return found


def _measure(configs: Mapping[str, Config], threads: int, here: bool, answers: Connection) -> None:
    """The separate process: sends the sizes of all arms, then each size again with its time."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    end_with_parent()
    import torch

    from ngpt_train.core.log import saying_nothing  # which imports torch
    from ngpt_train.models import build_model
    from ngpt_train.report.launch_plan import planned_vocabulary

    torch.set_num_threads(threads)
    sized: dict[str, tuple[Config, ArmSize]] = {}
    try:
        for arm, config in configs.items():
            if config.model.vocab_size == AUTO:
                config = replace(config, model=replace(config.model, vocab_size=planned_vocabulary(config)))
            with torch.device("meta"), saying_nothing():
                model = build_model(config.model)
            flops = model.flops_per_token(config.model.context)
            sized[arm] = config, ArmSize(model.n_params(), flops, None, "" if here else "the runs go elsewhere")
            answers.send((arm, sized[arm][1]))
    except Exception as error:
        answers.send(("", error))
        return
    for arm, (config, size) in sized.items() if here else ():
        try:
            answers.send((arm, _measured(config, size)))
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            answers.send((arm, replace(size, why_not=first_line[:200])))


def _measured(config: Config, size: ArmSize) -> ArmSize:
    """`size` with the seconds per token of a step of one micro batch."""
    from ngpt_train.distributed.world import resolve_device
    from ngpt_train.study.random_steps import steps_of
    from ngpt_train.training.hooks.saving import available_memory
    from ngpt_train.training.state import build_state

    device = resolve_device(config.train.device, 0).type
    of_row = size.flops_per_token * config.model.context
    needed, free = 16 * size.n_params, available_memory()  # needed: bytes of weights, gradients and moments
    if of_row > _HARD_FLOPS[device] or (device == "cpu" and free is not None and needed > free / 2):
        return replace(size, why_not="the model is too large to be measured here")
    rows = max(1, min(config.train.rows_per_step, TOKENS // config.model.context, int(_MOST_FLOPS[device] / of_row)))
    train = replace(config.train, batch_rows=rows, batch_tokens=rows * config.model.context, micro_rows=rows)
    run = steps_of(build_state(replace(config, train=train)))
    times = []
    for _ in range(1 + _ROUNDS):  # the first one warms up
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return replace(size, seconds_per_token=min(times[1:]) / (rows * config.model.context))


def table(study: Study, lines: Sequence[Cost], sizes: Mapping[str, ArmSize], jobs: int) -> str:
    head = ("arm", "parameters", "tokens", "steps", "runs", "tokens of all", "FLOPs", "hours of one", "hours")
    rows: list[tuple[str, ...]] = [head]
    for line in lines:
        counts = (line.tokens, f"{line.steps:,}", str(line.runs), line.tokens * line.runs)
        hours = None if line.hours is None else line.hours * line.runs
        cells = (line.arm, sizes[line.arm].n_params, *counts, f"{line.flops:.3g}", _hours(line.hours), _hours(hours))
        rows.append(tuple(cell if isinstance(cell, str) else format_count(cell) for cell in cells))
    n, most = sum(line.runs for line in lines), sum(line.most_runs for line in lines)
    known = [line.hours * line.runs for line in lines if line.hours is not None]
    hours_of_all = sum(known) if lines and len(known) == len(lines) else None
    totals = ("in all", "", "", "", str(n), format_count(sum(line.tokens * line.runs for line in lines)))
    rows.append((*totals, f"{sum(line.flops for line in lines):.3g}", "", _hours(hours_of_all)))
    names, *others = zip(*rows, strict=True)
    columns = [[cell.ljust(max(map(len, names))) for cell in names]]
    columns += [[cell.rjust(max(map(len, column))) for cell in column] for column in others]
    parts = {"arm": study.arms, "budget": study.budgets, "seed": study.seeds}
    scope = ", ".join(f"{len(all_of)} {word}{'s' * (len(all_of) > 1)}" for word, all_of in parts.items())
    notes = [
        f"{study.name}: {scope}; tuned: {', '.join(study.tuned_keys)}; baseline {study.baseline}",
        "",
        *("  ".join(row) for row in zip(*columns, strict=True)),
        "",
        f"Runs: as many as tuning takes where the recipe's learning rate is the best one; at most {most} where it is "
        "far from it.",
    ]
    if hours_of_all is not None:
        beside = f"with {jobs} side by side some {_hours(hours_of_all / jobs)} hours" if jobs > 1 else "one by one"
        notes.append(f"Hours: by a step measured here, of a run that has its share of the machine; {beside}.")
    notes += [f"Hours of {arm}: unknown, {size.why_not}." for arm, size in sizes.items() if size.why_not]
    if missing := [arm for arm in study.arms if arm not in sizes]:
        why = f"what measures them took longer than {MEASURE_SECONDS:g} seconds, or was killed"
        notes.append(f"Not in the table: {', '.join(missing)}; {why}.")
    return "\n".join(notes)


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:.2f}" if hours < 10 else f"{hours:,.0f}"
