"""A study prints what it costs, and then counts, the best losses so far and the time left."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ngpt_train.__main__ import main
from ngpt_train.config.schema import Config
from ngpt_train.study import cost, progress_lines, runner
from ngpt_train.study.cost import ArmSize, Cost, table
from ngpt_train.study.definition import LR
from ngpt_train.study.points import Point, Result
from ngpt_train.study.progress_lines import ProgressLines, TimeLeft, best_so_far, summary
from tests.unit.study.searches import result, study
from tests.unit.study.small_study import options


def point(number: int, arm: str = "gpt", budget: int = 1000) -> Point:
    return Point(arm, budget, ((LR, 0.001 * 2**number),), 0)


COSTS = [
    Cost("gpt", 1000, 10, 1000, runs=5, most_runs=11, flops=5e9, hours=0.5),
    Cost("[ngpt]", 1000, 10, 1000, runs=5, most_runs=11, flops=10e9, hours=1.0),
]
RESULTS: dict[Point, Result] = {
    point(0): result(point(0), 3.5),
    point(1): result(point(1), 3.25),
    point(2): result(point(2), None),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress_lines.time, "monotonic", lambda: now[0])
    return now


def test_the_best_so_far() -> None:
    """Caught: a failed point or a smaller budget that is called the best; a value to which the descent did not go."""
    of = study(budgets=(1000, 819_200))
    assert best_so_far(of, "gpt", RESULTS, {}) == "loss 3.2500 at 1k tokens with lr=0.002 (1 of 3 seeds)"
    larger = {point(3, budget=819_200): result(point(3, budget=819_200), 4.0)}
    assert best_so_far(of, "gpt", RESULTS | larger, {}) == "loss 4.0000 at 819k tokens with lr=0.008 (1 of 3 seeds)"
    assert best_so_far(of, "other", RESULTS, {}) == ""
    assert best_so_far(of, "gpt", RESULTS, {1000: {"optim.eps": 1.0}}) == ""


def test_a_dry_run_shows_the_cost_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: numbers that are not those of `plan`; hours that nobody measured; a directory that is left."""

    def measured(configs: Mapping[str, Config], threads: int, here: bool) -> dict[str, ArmSize]:
        """In this process, which has torch already."""
        sizes: dict[str, ArmSize] = {}
        cost._measure(configs, threads, here, SimpleNamespace(send=lambda named: sizes.update([named])))  # type: ignore[arg-type]
        return sizes

    monkeypatch.setattr(runner, "measure", measured)
    monkeypatch.setattr(cost, "end_with_parent", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RANK", raising=False)
    of_runs = ["scale=debug", "data=embedded", "tokenizer=bytes", "train.device=cpu"]
    given = ["study=small", *options(tmp_path), *of_runs, f"study.root={tmp_path / 'studies'}"]
    given += ["study.budgets=[51200]", "study.seeds=[0,1,2]", f"study.threads={torch.get_num_threads()}"]
    assert main(["study", *given, "study.dry_run=true"]) == 0
    said = capsys.readouterr().out
    rows = {row.split()[0]: row.split() for row in said.splitlines() if row.startswith(("gpt ", "ngpt ", "in all"))}
    plan = tmp_path / "plan.json"
    assert main(["plan", "model=gpt", *of_runs, "train.steps=100", f"plan.out={plan}"]) == 0
    planned = json.loads(plan.read_text())
    _, parameters, tokens, steps, n, all_tokens, flops, *hours = rows["gpt"]
    assert (tokens, steps, n, all_tokens) == ("51.2k", "100", "5", "256k")
    assert float(flops) == pytest.approx(5 * planned["total_flops"], rel=5e-3)
    assert parameters == f"{planned['parameters']['total'] / 1000:.3g}k"
    assert all(0 <= float(x) < 1 for x in hours)
    assert "at most" in said
    assert not (tmp_path / "studies").exists()


def test_arms_that_were_not_measured() -> None:
    """Caught: an arm that a slow measurement leaves out of the table in silence; 0.00 hours where nothing is known."""
    of, sizes = study(arms=("gpt", "ngpt")), {"gpt": ArmSize(10, 5, 1.0, "")}
    assert "Not in the table: ngpt; what measures them took longer than 300 seconds" in table(of, COSTS[:1], sizes, 1)
    nothing = table(of, [], {}, 1)
    assert "Not in the table: gpt, ngpt;" in nothing
    assert "0.00" not in nothing
    assert "Not in the table" not in table(of, COSTS[:1], sizes | {"ngpt": sizes["gpt"]}, 1)


def test_the_time_that_is_left() -> None:
    """Caught: runs that have ended, or the part of a run that is done, and are still counted; jobs side by side that
    are counted one by one; an estimate that never learns; an arm that the table of costs does not have."""
    left = TimeLeft(COSTS, jobs=2)
    left.update({}, [point(0), point(1)], 0.0)
    assert left.seconds({}, [point(0), point(1)], [], 0.0) == (5 * 1800 + 5 * 3600) / 2
    assert left.seconds({}, [point(0), point(1)], [], 600.0) == (5 * 1800 + 5 * 3600 - 2 * 600) / 2
    done = {point(0): RESULTS[point(0)], point(1): RESULTS[point(1)]}
    left.update(done, [], 900.0)  # each took 900 seconds, not 1800
    assert left.seconds(done, [point(2), point(3)], [], 900.0) == (3 * 900 + 5 * 1800) / 2
    more = [point(number) for number in range(2, 12)]  # than the table expected
    assert left.seconds(done, [], more, 900.0) == (10 * 900 + 5 * 1800) / 2
    assert TimeLeft([Cost("gpt", 1000, 1, 1, 1, 1, 1.0, None)], 1).seconds({}, [], [point(0)], 0.0) is None
    unmeasured = TimeLeft([], jobs=2)
    unmeasured.update({}, [point(0)], 0.0)
    assert unmeasured.seconds({}, [point(0)], [], 1.0) is None
    unmeasured.update({point(0): RESULTS[point(0)]}, [], 900.0)
    assert unmeasured.seconds({point(0): RESULTS[point(0)]}, [], [], 900.0) == 0.0


def test_the_time_that_is_left_does_not_jump() -> None:
    """Caught: an estimate that doubles while a search waits for its last run; an estimate from the speed of the last
    run's arm alone."""
    left = TimeLeft([COSTS[0], replace(COSTS[1], flops=5e9)], jobs=2)
    ours, its = point(0), point(0, "[ngpt]")
    left.update({}, [ours, its], 0.0)
    left.update({its: result(its, 3.0)}, [ours, point(1)], 3600.0)  # as the table has it, with other FLOPs a second
    done = {point: result(point, 3.0) for point in (its, ours)}
    left.update(done, [point(1)], 3600.0)
    before = left.seconds(done, [point(1), point(2)], [point(3)], 3601.0)
    assert before is not None
    assert before == pytest.approx((4 * 1800 * 1.333 + 4 * 3600 * 1.333) / 2, rel=0.01)
    assert left.seconds(done, [point(1)], [], 3601.0) == pytest.approx(before, rel=0.01)


def test_plain_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: control characters in a log; a study that says nothing for hours, or the same twice; a run that has ended
    and is counted as running; a line that is lost at the end."""
    with ProgressLines(study(), COSTS, 1, lambda results: {"gpt": {}}) as shown:
        shown.update({}, [point(0)], [point(1)])
        shown.say("one")
        shown.say("two")
        clock[0] = 30
        shown.update({point(0): RESULTS[point(0)]}, [point(1)], [])
        for clock[0] in range(31, 150):
            shown.update(RESULTS, [point(4)], [point(5)])
        shown.say("three")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one  (1 of some 10 runs done, 1 running, 0 waiting, some 7m00s left)"
    assert lines[1] == "two"
    assert lines[2].startswith("2 of some 10 runs done, 1 failed, 1 running, 1 waiting, some ")
    assert lines[3:5] == ["best so far:", "  gpt: loss 3.2500 at 1k tokens with lr=0.002 (1 of 3 seeds)"]
    assert lines[5:] == ["three"]
    assert summary(RESULTS, [point(4)], [point(5)], n_expected=4).startswith("2 of some 5 runs")
