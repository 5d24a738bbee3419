"""The interaction of four arms by its formula."""

import math

import numpy as np
import pytest
from scipy.stats import t as student

from ngpt_train.study.compare.interactions import interactions
from ngpt_train.study.compare.output import study_tables
from ngpt_train.study.compare.trials import Arm, read_arm
from ngpt_train.study.points import Point
from tests.unit.study.simulated import run_of

BUDGET = 409_600
LR = (("optim.lr", 0.01),)


def arm(name: str, losses: dict[int, float], rate_below: float | None = None) -> Arm:
    """losses: by seed. rate_below: the loss of seed 0 at half the rate, for an arm whose best is at an edge."""
    points = {Point(name, BUDGET, LR, seed): loss for seed, loss in losses.items()}
    if rate_below is not None:
        points[Point(name, BUDGET, (("optim.lr", 0.005),), 0)] = rate_below
    runs = [run_of(point, loss) for point, loss in points.items()]
    return read_arm(name, runs, {run.path: BUDGET for run in runs}, ["optim.lr"], "loss", 0.95)


def test_an_interaction() -> None:
    """Caught: another sign or order of the arms, seeds that not all arms have, unpaired noise."""
    rng = np.random.default_rng(0)
    drawn = {name: dict(enumerate(3 + rng.normal(0, 0.01, 4))) for name in "abcd"}
    drawn["d"].pop(3)
    entries, notes = interactions({"x": "abcd"}, {n: arm(n, x) for n, x in drawn.items()}, "loss", 0.95)
    each = [drawn["a"][s] - drawn["b"][s] - (drawn["c"][s] - drawn["d"][s]) for s in range(3)]
    (entry,) = entries
    half = student.ppf(0.975, 2) * np.std(each, ddof=1) / math.sqrt(3)
    assert entry["estimate"] == pytest.approx(np.mean(each))
    assert (entry["low"], entry["high"]) == pytest.approx((np.mean(each) - half, np.mean(each) + half))
    assert (entry["n_seeds"], entry["untuned"]) == (3, [])
    assert any("validation rows" in note for note in notes)


def test_an_untuned_arm_resolves_nothing() -> None:
    losses = {name: {s: level + 1e-6 * s for s in range(3)} for name, level in zip("abcd", (3, 4, 4, 4), strict=True)}
    arms = {name: arm(name, x) for name, x in losses.items()}
    (entry,), _ = interactions({"x": "abcd"}, arms, "loss", 0.95)
    assert entry["resolved"]
    assert entry["high"] < 0
    (entry,), _ = interactions({"x": "abcd"}, arms | {"b": arm("b", losses["b"], rate_below=4.5)}, "loss", 0.95)
    assert not entry["resolved"]
    assert entry["untuned"] == ["b"]
    (table,) = study_tables.interactions({"unit": "nats per token", "interactions": [entry]})
    assert table.rows[0][:3] == ["x", "(a less b) less (c less d)", "410k"]
    assert table.rows[0][-1] == "untuned: b"


def test_arms_without_a_run_or_a_common_seed() -> None:
    arms = {name: arm(name, {seed: 3.0}) for seed, name in enumerate("abc")}
    entries, notes = interactions({"x": "abcd", "y": "abca"}, arms, "loss", 0.95)
    assert not entries
    assert [note.partition(":")[0] for note in notes] == ["interaction x", "interaction y"]
    assert "d has no run" in notes[0]
