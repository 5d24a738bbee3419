"""Interactions: what a change of an arm is worth less when another change is there, too.

Of four arms a, b, c, d with end losses L, paired by seed and validation row:

    I = (L_a - L_b) - (L_c - L_d)

With a and b nGPT and GPT under Muon, c and d the same under AdamW, I > 0 is the part of nGPT's advantage that Muon
takes away. Its interval is a difference's (noise.py), of D = L_a - L_b against the baseline D' = L_c - L_d.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ngpt_train.study.compare.intervals import difference_at
from ngpt_train.study.compare.noise import Noise, Pair
from ngpt_train.study.compare.trials import UNTUNED, Arm, crossed, price_at


def interactions(
    asked: Mapping[str, Sequence[str]], arms: Mapping[str, Arm], metric: str, confidence: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """`interactions` of report.json, an entry for each budget at which all four arms have a common seed; and notes.
    asked: the names of a, b, c, d by the interaction's name. arms: by name; a missing one has no run."""
    entries, notes = [], []
    for name, names in asked.items():
        if missing := [arm for arm in names if arm not in arms]:
            notes.append(f"interaction {name}: {', '.join(missing)} has no run")
            continue
        four = [arms[arm] for arm in names]
        pair, why = _pair_of(four, metric)
        if pair is None:
            notes.append(f"interaction {name}: {why}")
            continue
        notes += [f"interaction {name}: {why}"] if why else []
        noise = Noise(pair)
        for at, budget in enumerate(map(int, pair.budgets)):
            found = difference_at(pair, noise, at, confidence)
            states = {x.name: x.state(budget) for x in four}
            mixed = {"not tried", "bracketed"} <= set(states.values())
            untuned = [x for x, state in states.items() if state in UNTUNED or (mixed and state == "not tried")]
            ends = {"estimate": found.estimate, "low": found.low, "high": found.high, "confidence": confidence}
            counts = {"n_seeds": found.n_seeds, "n_rows": found.n_rows}
            judged = {"resolved": found.is_resolved and not untuned, "untuned": untuned}
            entries.append({"name": name, "arms": list(names), "budget": budget, **ends, **counts, **judged})
    return entries, notes


def _pair_of(four: Sequence[Arm], metric: str) -> tuple[Pair | None, str]:
    """D against D' at the budgets and seeds that all four arms have; None and the reason where there are none, else
    the reason why validation rows are left out."""
    budgets = sorted(set.intersection(*(set(arm.best) for arm in four)))
    cells = {budget: [arm.at_best(budget) for arm in four] for budget in budgets}
    cells = {budget: arms for budget, arms in cells.items() if set.intersection(*map(set, arms))}
    if not cells:
        return None, "its arms have no budget and seed in common"
    _, (a, b, c, d), rows, why = crossed(cells, metric)
    of_baseline, of_arm = (None, None) if rows is None else (rows[2] - rows[3], rows[0] - rows[1])
    prices = np.array([[price_at(arm, budget) for arm in four] for budget in cells])  # (K, 4, 2)
    # What a and d may still gain lowers I; what b and c may still gain raises it.
    sides = [prices[:, (1, 2)], prices[:, (0, 3)]]
    both = [np.stack([x[:, :, 0].sum(1), np.hypot(x[:, 0, 1], x[:, 1, 1])], axis=1) for x in sides]
    pair = Pair(np.array(list(cells), float), c - d, a - b, of_baseline, of_arm, prices=np.stack(both, axis=1))
    return pair, "" if rows is not None else f"without the noise of validation rows, because {why}"
