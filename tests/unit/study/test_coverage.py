"""How often intervals of whole studies hold planted truths, also where they once failed (docs/study.md)."""

from __future__ import annotations

import numpy as np
import pytest

from ngpt_train.study.compare.versus import versus
from tests.unit.study.simulated import Case, Found, faster_and_faster, plateau_first, simulate

SHARP = (0.1, 0.27)  # nats at an octave from the best rate, for an arm as sharp as nGPT
FIXED = {"max_points": 1}
# Each failed before: the least coverage of a nominal 95 % interval, and what failed.
CASES = {
    "noise falls": Case(sigma=(0.06, 0.06, 0.03, 0.02)),  # 0.81 at the small budgets
    "noise grows": Case(sigma=(0.01, 0.02, 0.04, 0.08), **FIXED),  # 0.72 at the last one, verdicts in 28 %
    "half an octave off": Case(best=(0.0, 0.5), price=SHARP, ratio=1.25),  # 0.42
    "a quarter off": Case(best=(0.0, 0.25), price=SHARP, ratio=1.25),
    "baseline off": Case(best=(0.5, 0.0)),  # 0.86
    "drift": Case(drift=(0.0, 0.45), price=SHARP, ratio=1.5),  # 0.43
    "one seed diverges": Case(diverges=True, price=SHARP),  # 0.07, "worse" in 90 %
    "plateau": Case(curve=plateau_first, ratio=1.25, **FIXED),  # ratio 0.46
    "long plateau": Case(curve=plateau_first, ratio=1.7, sigma=0.01, **FIXED),  # ratio 0.01
    "a key off": Case(key_price=(0.0, 0.1), key_best=(0.0, 0.5), sigma=0.01, n_budgets=1),  # 0.62, "worse" in 31 %
    "a valley": Case(
        key_price=(0.0, 0.04), key_best=(0.0, 1.0), valley=1.0, sigma=0.01, n_budgets=1
    ),  # 0.56, "worse" in 40 %
    "faster and faster": Case(curve=faster_and_faster, ratio=1.25, **FIXED),
}
# These held before.
OTHERS = {
    "fixed rates": Case(**FIXED),
    "fixed rates, ratio 1.25": Case(ratio=1.25, **FIXED),
    "tuned": Case(),
    "price like the noise": Case(price=(0.03, 0.03)),
    "heavy tails": Case(tails=3.0),
    "five and two seeds": Case(seeds=(5, 2), **FIXED),
    "five seeds": Case(seeds=(5, 5), **FIXED),
    "two seeds": Case(seeds=(2, 2), **FIXED),
    "crossing": Case(ratio=(1.6, 1.25, 1.0, 0.8)),
    "one loud budget": Case(sigma=(0.02, 0.02, 0.02, 0.08), **FIXED),
    "two budgets": Case(n_budgets=2),
    "both arms' keys off": Case(key_price=(0.1, 0.05), key_best=(0.3, -0.5), n_budgets=1),
}


def test_a_seed_that_diverges_makes_no_arm_worse() -> None:
    """Caught: "worse" or "better" from divergence alone; an arm that is worse anyhow, and no longer called so."""
    for ratio, words in ((1.0, ("divergence", "divergence")), (0.6, ("worse", "better"))):
        case = Case(ratio=ratio, n_budgets=1, diverges=True, sigma=0.002, price=SHARP)
        baseline, arm = case.draw(np.random.default_rng(3))
        runs = {x.name: [trial.run for trial in x.trials] for x in (baseline, arm)}
        for one, other, word in ((arm, baseline, words[0]), (baseline, arm, words[1])):
            found = versus(one, other, runs, "loss", 0.95, {})
            assert found["verdict"] == word
            said = [note for note in found["notes"] if "With optim.lr=0.001 ngpt diverges for seed 2 of 3" in note]
            assert len(said) == 1
            assert "than with optim.lr=0.000707107, the best at which all seeds end" in said[0]


def check(case: Case, found: Found, draws: int) -> None:
    """At least 0.92 but for chance; equal arms get a verdict in 8 % at most, but for chance."""
    chance = 2.5 * np.sqrt(0.92 * 0.08 / draws)
    print(f"{found}")
    assert min(found.difference) >= 0.92 - chance
    assert min(found.ratio) >= 0.92 - chance
    assert np.isnan(found.trend) or found.trend >= 0.92 - chance
    if case.ratio == 1.0:
        assert found.verdicts.get("better", 0) + found.verdicts.get("worse", 0) <= 0.08 + chance


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_intervals_hold_where_they_failed(name: str) -> None:
    """Caught: noise pooled over budgets; intervals without the price of a grid, of rates or of a key; ratios and trends
    from a form that the losses do not have; "worse" from one seed that diverges."""
    found = simulate(CASES[name], 100)
    check(CASES[name], found, 100)
    if CASES[name].curve in (plateau_first, faster_and_faster):
        assert found.known[-1] <= 0.1, "a ratio from beyond the budgets"
        assert found.trends <= 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_coverage(name: str) -> None:
    case = {**CASES, **OTHERS}[name]
    check(case, simulate(case, 400, seed=1), 400)


@pytest.mark.slow
def test_equal_noise_gives_narrower_intervals_than_a_budget_alone() -> None:
    """Caught: intervals from each budget alone. Theirs would be Student's with 2 degrees of freedom."""
    found = simulate(Case(**FIXED), 40)
    own = 2 * 4.303 * np.sqrt(np.pi) / 2 * 0.03 * np.sqrt(2 / 3)
    assert np.mean(found.width) < 0.93 * own
