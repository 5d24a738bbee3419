"""Takes a run back to its last good checkpoint, past the rows that made its loss spike (guards.rollback)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import Config
from ngpt_train.core.files import read_json, remove, write_json
from ngpt_train.data import merged
from ngpt_train.training import TrainState
from ngpt_train.training.checkpoint import last_good, list_checkpoints, load_state, step_of
from ngpt_train.training.checkpoint.files import UNFINISHED
from ngpt_train.training.guards import GoBack, NumericalError
from ngpt_train.training.run_directory import RunDirectory


def every(config: Config) -> int:
    """The run goes back to checkpoints at multiples of this step."""
    return config.checkpoint.every or 1


def target(run: RunDirectory, config: Config) -> Path | None:
    """The checkpoint to go back to, if there is one. A checkpoint that an interrupted run left between those that were
    planned is none, so that an interruption does not change which rows are left out."""
    return last_good(run.checkpoints, every(config))


def may_go_back(run: RunDirectory, state: TrainState, why: str, advice: str) -> bool:
    """Whether there is a good checkpoint to go back to. A collective call.

    Raises NumericalError if the run has gone back to that one guards.most_rollbacks times already.
    """
    good = state.world.on_main(lambda: target(run, state.config))
    if good is None:
        return False
    in_a_row = sum(rollback["step"] == step_of(good) for rollback in state.rollbacks)
    if in_a_row >= state.config.guards.most_rollbacks:
        raise NumericalError(
            f"{why}, and the run has gone back to step {step_of(good)} {in_a_row} times already "
            f"(guards.most_rollbacks). {advice}."
        )
    return True


def go_back(run: RunDirectory, state: TrainState, back: GoBack) -> dict[str, Any]:
    """Loads the last good checkpoint into `state`, and returns the position in the data from which the run goes on: the
    one after the bad step. Notes it in run.json, and deletes the checkpoints of what is left out. A collective call.

    Raises DataError if the checkpoint is damaged.
    """
    world, rollbacks = state.world, state.rollbacks
    after = merged(world.gather(back.position))
    checkpoint = world.on_main(lambda: target(run, state.config))
    assert checkpoint is not None  # may_go_back has seen it
    before = load_state(checkpoint, state)
    rollback = {
        "number": len(rollbacks) + 1,
        "step": state.step,
        "bad_step": back.bad_step,
        "why": back.why,
        **back.facts,
        "first_row": before["rows"],
        "last_row": after["rows"] - 1,
    }
    state.rollbacks = [*rollbacks, rollback]
    world.on_main(lambda: _note(run, state))
    # The sum over the rows that the weights have seen; `rows` counts those that are left out, too.
    return after | {"data_hash": before["data_hash"]}


def record_of(state: TrainState) -> dict[str, Any] | None:
    """The record of the rollback that has led to this state, None if none has."""
    last: Mapping[str, Any] = state.rollbacks[-1] if state.rollbacks else {}
    if last.get("step") != state.step:
        return None
    numbers = {name: value for name, value in last.items() if name != "why"}
    return {"kind": "rollback", "tokens": int(state.tokens)} | numbers


def describe(rollback: Mapping[str, Any]) -> str:
    """A rollback in words."""
    return (
        f"rollback {rollback['number']}: {rollback['why']}; back to step {rollback['step']}, without the rows "
        f"{rollback['first_row']} to {rollback['last_row']}"
    )


def _note(run: RunDirectory, state: TrainState) -> None:
    for path in list_checkpoints(run.checkpoints):
        if step_of(path) > state.step:
            # Renamed first, as by a save, which deletes what a kill leaves of it.
            doomed = path.with_name(f"{UNFINISHED}deleting-{path.name}")
            path.rename(doomed)
            remove(doomed)
    path = run.path / "run.json"
    write_json(path, read_json(path) | {"saved": state.step, "rollbacks": state.rollbacks})
