"""Ends a run whose gradients stay infinite or NaN, or takes it back to its last good checkpoint, past the rows that
made its loss spike (guards.rollback)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import told_by_rank_0
from ngpt_train.core.files import read_json, write_json
from ngpt_train.data.loader import Position, merged
from ngpt_train.training.checkpoint.catalogue import last_good, list_checkpoints, step_of
from ngpt_train.training.checkpoint.load import load_state
from ngpt_train.training.checkpoint.save import delete
from ngpt_train.training.guards import MAX_SKIPPED_IN_A_ROW, NumericalError
from ngpt_train.training.hooks.saving import SaveCheckpoints
from ngpt_train.training.loop import Hook, TrainingRun
from ngpt_train.training.run_directory import RunDirectory
from ngpt_train.training.state import TrainState


class GoBack(Exception):
    """Sends the run back to its last good checkpoint, to go on with the rows after `position`, this rank's. bad_step:
    the last step whose rows are left out. why, facts: the reason in words and in numbers."""

    def __init__(self, bad_step: int, position: Position, why: str, facts: Mapping[str, float | None]) -> None:
        super().__init__(why)
        self.bad_step, self.position, self.why, self.facts = bad_step, position, why, dict(facts)


class Rollback(Hook):
    """Raises GoBack once the guards have seen a bad step, if there is a checkpoint to go back to. advice: a sentence
    for the user, once the run has gone back too often."""

    def __init__(self, directory: RunDirectory, saves: SaveCheckpoints, advice: Callable[[], str]) -> None:
        self._directory, self._saves, self._advice = directory, saves, advice
        self._after: dict[int, Position] = {}  # the positions after the steps since the guards were last asked

    def after_step(self, run: TrainingRun) -> None:
        assert run.position is not None
        self._after[run.step] = run.position

    def check(self, run: TrainingRun) -> None:
        if not run.rests:
            return
        guards = run.state.guards
        if bad_step := guards.bad_step():
            self._saves.settle(run, "the way back")
            if self._may_go_back(run.state):
                raise GoBack(bad_step, self._after[bad_step], guards.why(), guards.facts())
            run.warn(f"{guards.why()}, and there is no good checkpoint to go back to.")
            guards.forget()
        self._after.clear()

    def _may_go_back(self, state: TrainState) -> bool:
        """True if there is a good checkpoint to go back to. A collective call. Raises NumericalError if the run has
        gone back to this checkpoint guards.most_rollbacks times already."""
        good = state.world.on_main(lambda: target(self._directory, state.config))
        if good is None:
            return False
        in_a_row = sum(rollback["step"] == step_of(good) for rollback in state.rollbacks)
        if in_a_row >= state.config.guards.most_rollbacks:
            raise NumericalError(
                f"{state.guards.why()}, and the run has gone back to step {step_of(good)} {in_a_row} times already "
                f"(guards.most_rollbacks). {self._advice()}."
            )
        return True


def go_back_every(config: Config) -> int:
    """The run goes back to checkpoints at multiples of this step."""
    return config.checkpoint.every or 1


def target(directory: RunDirectory, config: Config) -> Path | None:
    """The checkpoint to go back to, if there is one. Checkpoints between the planned steps do not count: they come from
    an interruption, which must not change the rows that are left out."""
    return last_good(directory.checkpoints, go_back_every(config))


def go_back(directory: RunDirectory, state: TrainState, back: GoBack) -> dict[str, Any]:
    """Loads the last good checkpoint into `state`, and returns the position in the data after the bad step. Notes the
    rollback in run.json, and deletes later checkpoints. A collective call.

    Raises DataError if the checkpoint is damaged.
    """
    world, rollbacks = state.world, state.rollbacks
    after = merged(world.gather(back.position))
    checkpoint = world.on_main(lambda: target(directory, state.config))
    assert checkpoint is not None  # the hook has seen it
    before = load_state(checkpoint, state)
    rollback = {"number": len(rollbacks) + 1, "step": state.step, "bad_step": back.bad_step, "why": back.why}
    rollback |= {**back.facts, "first_row": before["rows"], "last_row": after["rows"] - 1}
    state.rollbacks = [*rollbacks, rollback]
    world.on_main(lambda: _note(directory, state))
    # data_hash is the sum over the rows that the weights have seen; `rows` also counts rows that are left out.
    return after | {"data_hash": before["data_hash"]}


def record_of(state: TrainState) -> dict[str, Any] | None:
    """The record of the rollback to this state, if the run has just gone back."""
    last: Mapping[str, Any] = state.rollbacks[-1] if state.rollbacks else {}
    if last.get("step") != state.step:
        return None
    numbers = {name: value for name, value in last.items() if name != "why"}
    return {"kind": "rollback", "tokens": int(state.tokens)} | numbers


def describe(rollback: Mapping[str, Any]) -> str:
    return (
        f"rollback {rollback['number']}: {rollback['why']}; back to step {rollback['step']}, without the rows "
        f"{rollback['first_row']} to {rollback['last_row']}"
    )


def _note(directory: RunDirectory, state: TrainState) -> None:
    for path in list_checkpoints(directory.checkpoints):
        if step_of(path) > state.step:
            delete(path)
    path = directory.path / "run.json"
    write_json(path, read_json(path) | {"saved": state.step, "rollbacks": state.rollbacks})


class SkippedSteps(Hook):
    """Raises NumericalError after MAX_SKIPPED_IN_A_ROW skipped steps in a row, and after two at the planned end.
    advice: a sentence for the user."""

    def __init__(self, advice: Callable[[], str]) -> None:
        self._advice = advice

    def check(self, run: TrainingRun) -> None:
        if not run.rests:
            return
        run.skipped = int(run.state.guards.skipped_in_a_row)
        if run.skipped < MAX_SKIPPED_IN_A_ROW and not (run.skipped > 1 and run.step == run.last):
            return
        problem = f"{run.skipped} steps in a row, up to step {run.step}, had a gradient that is not finite"
        fix = f"{self._advice()}, or look at the data after step {run.step - run.skipped}."
        in_fp16 = " The loss scale is 1: if fp16 overflows, use another precision." if run.state.loss_scale else ""
        raise told_by_rank_0(NumericalError(f"{problem} and were skipped. {fix}{in_fp16}"))
