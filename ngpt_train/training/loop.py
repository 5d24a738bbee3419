"""The loop over steps. Everything beside the steps is a hook (hooks/hook.py)."""

from __future__ import annotations

import time

import torch

from ngpt_train.training.guards import explain_out_of_memory
from ngpt_train.training.hooks.hook import STEP, TrainingRun
from ngpt_train.training.hooks.stopping import StoppedWaitingError
from ngpt_train.training.step import NOBODY, train_step


def train(run: TrainingRun) -> str | None:
    """Trains from state.step to train.steps, or to train.stop_at, or until a hook sets `run.reason`.

    Returns why the run stopped early; None at the planned end. Errors of hooks pass; raises DeviceMemoryError.
    """
    with run.around():
        run.at("start")
        while run.step < run.last and run.reason is None:
            if not take_step(run):
                save_while_waiting(run)
                break
            run.at("after_step")
            if run.step == run.last:
                run.reason = None  # the planned end does not come early
            run.saving = run.saving or run.ends
            run.at("check")
            if run.saving:
                run.at("save")
            if run.reason is None:
                run.at("evaluate")
        for hook in reversed(run.hooks):
            hook.finish(run)
    return run.reason


def take_step(run: TrainingRun) -> bool:
    """Waits for the rows of the next step and takes it; False if the run was told to stop while it waited."""
    state = run.state
    started = time.perf_counter()
    try:
        with run.during("the rows of step", run.step + 1):
            micro_batches, run.position = next(run.batches)
    except StoppedWaitingError:
        if state.world.size > 1:
            raise
        return False
    fetched = time.perf_counter()
    run.observer, run.saving = None, False
    run.at("before_step")
    # The numbers of this rank's rows, as data/loader.py deals them.
    rows = torch.arange(state.world.rank, state.config.train.rows_per_step, state.world.size)
    with explain_out_of_memory(state.micro_rows), run.during(STEP, run.step + 1):
        untouched = run.result is not None  # before the first step, the weights may have been loaded
        run.result = train_step(state, micro_batches, untouched=untouched, rows=rows, observer=run.observer or NOBODY)
    state.interval.add(run.result)
    state.guards.add(run.result, run.step)
    # Reading the loss waits for the device, so that `seconds` holds all of the step. Otherwise a checkpoint or a
    # validation would wait for the device, and the step's time would count as theirs.
    waits = run.step == run.last or any(hook.waits(run) for hook in run.hooks)
    run.loss = float(run.result.loss) if waits else None
    run.data_seconds, run.seconds = fetched - started, time.perf_counter() - started
    if state.train_seconds is not None:
        state.train_seconds += run.seconds
    return True


def save_while_waiting(run: TrainingRun) -> None:
    """Saves the last step after a wait for rows has ended, unless the step was skipped or a rollback is due."""
    run.reason = run.stop.reason
    run.skipped = int(run.state.guards.skipped_in_a_row)
    run.saving = run.result is not None and not run.skipped and not run.state.guards.bad_step()
    if run.saving:
        run.at("save")
