"""Only sound states become checkpoints, and the last good one stays."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.core.errors import DataError
from ngpt_train.observe.train_records import TrainRecords
from ngpt_train.training import build_state, loop, train_step
from ngpt_train.training.checkpoint import Checkpoints, find_checkpoint, last_good, list_checkpoints, load_state
from ngpt_train.training.checkpoint.catalogue import best, has_exploded, step_of
from ngpt_train.training.guards import MAX_SKIPPED_IN_A_ROW, NumericalError
from ngpt_train.training.hooks import TrainingRun
from ngpt_train.training.hooks.bad_steps import SkippedSteps
from ngpt_train.training.hooks.saving import SaveCheckpoints
from ngpt_train.training.hooks.stopping import StopRequest, StopTogether
from ngpt_train.training.loop import train
from ngpt_train.training.state import TrainState
from tests.properties.runs import infinite_loss
from tests.stored import save_state
from tests.unit.training.test_loop import NoMeter, Records, batch, batches, loop_config


def steps(directory: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(directory)]


def keeper(directory: Path, state: TrainState, keep_last: int = 1) -> Checkpoints:
    return Checkpoints(directory, state.world, keep_last, keep_every=None)


def weight(state: TrainState) -> Tensor:
    return next(state.model.parameters())


def moment(state: TrainState) -> Tensor:
    return state.optimizer.state[weight(state)]["exp_avg"]


def average(state: TrainState) -> Tensor:
    assert state.ema is not None
    return state.ema.weights["embedding"]


@pytest.mark.parametrize(
    ("tensor", "name", "value"),
    [
        (weight, "embedding", math.nan),
        (moment, "exp_avg of embedding", math.inf),
        (average, "the moving average of embedding", math.nan),
    ],
)
def test_a_state_that_is_not_finite_is_not_saved(
    tmp_path: Path, tensor: Callable[[TrainState], Tensor], name: str, value: float
) -> None:
    """Caught: one NaN in a weight, a moment or an average that takes the place of a good checkpoint."""
    state = build_state(loop_config(8, "optim.ema_decay=0.9"))
    train_step(state, batch(0))
    kept = keeper(tmp_path, state)
    good = save_state(kept, state, loss=4.0)
    state.step = 2
    with torch.no_grad():
        tensor(state).view(-1)[-1] = value
    with pytest.raises(NumericalError, match=rf"^step 2: {name} is not finite.*run\.init_from={good} ") as refused:
        save_state(kept, state, loss=4.0)
    assert refused.value.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    load_state(good, state)
    assert torch.isfinite(tensor(state)).all()


def test_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    """Caught: finite weights of a loss that has exploded, which push the good ones out."""
    state = build_state(loop_config(8))
    kept = keeper(tmp_path, state)
    for step, loss in enumerate([5.0, 4.0, 5.9, 80.0, math.nan, 9.0], start=1):
        state.step = step
        save_state(kept, state, loss)
    assert steps(tmp_path) == [3, 6]
    assert last_good(tmp_path) == tmp_path / "step_00000003"
    state.step = 7
    save_state(kept, state, loss=4.5)
    assert steps(tmp_path) == [7], "a good one that is newer takes its place"
    assert json.loads((tmp_path / "step_00000007/MANIFEST.json").read_text())["good"] is True


def test_a_damaged_manifest_is_of_no_good_checkpoint(tmp_path: Path) -> None:
    state = build_state(loop_config(8))
    kept = keeper(tmp_path, state, keep_last=3)
    for step in (1, 2, 3):
        state.step = step
        save_state(kept, state, loss=4.0)
    for step, content in ((2, "[]"), (3, "{")):
        (tmp_path / f"step_{step:08d}/MANIFEST.json").write_text(content)
    assert last_good(tmp_path) == tmp_path / "step_00000001"


def test_an_exploded_loss() -> None:
    assert not has_exploded(None, [4.0])
    assert not has_exploded(80.0, []), "the first one has nothing to be compared with"
    assert [has_exploded(loss, [5.0, 4.0]) for loss in (5.9, 6.1, math.inf, math.nan)] == [False, True, True, True]


def run(state: TrainState, directory: Path, stop: StopRequest | None = None) -> tuple[str | None, list[str]]:
    """Trains with real checkpoints; the reason of the end, and what was said."""
    said = Records()
    said.message = said.append  # type: ignore[method-assign, assignment]
    given = TrainingRun(state, batches(state.step), stop or StopRequest(None), sinks=[said])
    kept = keeper(directory, state)
    saves = SaveCheckpoints(given, kept, lambda path: None, lambda path: None)
    given.hooks += [TrainRecords(NoMeter(), {}), StopTogether(given.stop, state.world, state.step), saves]
    given.hooks += [SkippedSteps(lambda: kept.advice(0.01))]
    reason = train(given)
    return reason, [text for text in said if isinstance(text, str)]


@pytest.fixture
def bad_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the gradients of that step, from 0, and of all later ones infinite."""

    def set_first(first: int) -> None:
        def poisoned(state: TrainState, micro_batches: Any, **options: Any) -> Any:
            with infinite_loss(state) if state.step >= first else nullcontext():
                return train_step(state, micro_batches, **options)

        monkeypatch.setattr(loop, "train_step", poisoned)

    return set_first


def test_nothing_is_saved_while_steps_are_skipped(tmp_path: Path, bad_from: Callable[[int], None]) -> None:
    """Caught: exploded weights, whose gradients are infinite, in the place of the good ones; advice to begin from the
    last checkpoint, whatever it is."""
    bad_from(4)
    state = build_state(loop_config(20, "checkpoint.every=3"))
    with pytest.raises(NumericalError, match=rf"^{MAX_SKIPPED_IN_A_ROW} steps in a row.*init_from=.*/step_00000003 "):
        run(state, tmp_path)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("at", [5, 6])
def test_a_run_that_is_stopped_while_steps_are_skipped(
    at: int, tmp_path: Path, bad_from: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: exploded weights that are saved; steps that are lost for a single bad batch."""
    bad_from(4)
    stop = StopRequest(None)

    def log(_: Records, record: dict[str, Any]) -> None:
        if record["step"] == at:
            stop.signal_name = "SIGTERM"

    monkeypatch.setattr(Records, "log", log)
    reason, said = run(build_state(loop_config(20, "checkpoint.every=3", "logging.every=1")), tmp_path, stop)
    assert reason == "stopped by SIGTERM"
    assert steps(tmp_path) == ([5] if at == 5 else [3])
    warned = "warning: no checkpoint at step 6: the gradients of the last 2 steps were not finite."
    assert (said[-1] == warned) == (at == 6)


def test_the_planned_end_after_skipped_steps(tmp_path: Path, bad_from: Callable[[int], None]) -> None:
    """One bad batch at the very end must not make the end unreachable; two are no end."""
    bad_from(4)
    run(build_state(loop_config(5)), tmp_path / "one")
    assert steps(tmp_path / "one") == [5]
    with pytest.raises(NumericalError, match=r"^2 steps in a row.*has no good checkpoint"):
        run(build_state(loop_config(6)), tmp_path / "two")
    assert steps(tmp_path / "two") == []


def test_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    """Beside the last and every fourth, after a resume as well. Caught: the best of those that are deleted, a loss of
    which there is no checkpoint, the newest taken for the best."""
    state = build_state(loop_config(8))
    losses = [3.0, 2.0, 2.5, 2.9, 2.0, math.nan, 2.2, 2.6]
    for step, loss in enumerate(losses, start=1):
        kept = Checkpoints(tmp_path, state.world, keep_last=1, keep_every=4, keep_best=2)  # as after a resume
        state.step = step
        save_state(kept, state, loss=4.0)
        kept.validated(step, loss)
    assert steps(tmp_path) == [2, 4, 5, 8]
    assert [step_of(path) for path in best(tmp_path, 9)] == [2, 5, 8, 4]
    assert find_checkpoint("evaluate.checkpoint", str(tmp_path / "best")) == tmp_path / "step_00000002"
    assert find_checkpoint("evaluate.checkpoint", str(tmp_path)) == tmp_path / "step_00000008"
    (tmp_path / "validation.json").write_text('{"2": "low"}')
    with pytest.raises(DataError, match=r"validation\.json is damaged"):
        find_checkpoint("evaluate.checkpoint", str(tmp_path / "best"))
    (tmp_path / "validation.json").unlink()
    with pytest.raises(DataError, match=r"checkpoint\.keep_best=1"):
        find_checkpoint("evaluate.checkpoint", str(tmp_path / "best"))


def test_the_checkpoint_to_go_back_to_stays(tmp_path: Path) -> None:
    """Caught: one that interruptions push out, so that a rollback goes back to another."""
    state = build_state(loop_config(8))
    kept = Checkpoints(tmp_path, state.world, keep_last=1, keep_every=None, go_back_every=4)
    for step in (4, 5, 6):
        state.step = step
        save_state(kept, state, loss=4.0)
    assert steps(tmp_path) == [4, 6]
    assert last_good(tmp_path, 4) == tmp_path / "step_00000004"
