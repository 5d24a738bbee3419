"""The next points of a study, a pure function of the results so far."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ngpt_train.study.definition import LR, Study
from ngpt_train.study.descent import Grid, Phase, descend, ends_of
from ngpt_train.study.points import DONE, Point, Results, carried
from ngpt_train.study.rates import At, Lattice, first_rates, next_rates
from ngpt_train.study.tuning import Trials, best_values, noise_between_seeds, sorted_values, tunings

Starts = Callable[[str, int], float]  # (arm, budget): the recipe's learning rate
Ends = dict[int, dict[str, Any]]  # by budget: values of further keys
Grids = Callable[[str, int], Mapping[str, Grid]]  # (arm, budget): of the further keys
# Beginning and end of reasons of failures that another learning rate does not change.
OUT_OF_MEMORY, CRASHED = "out of memory", "attempts)"


def next_points(study: Study, starts: Starts, grids: Grids, results: Results) -> list[Point]:
    """The points that can run now, also unfinished ones; none in a complete study. results: only final ones count."""
    return [point for arm in study.arms for point in _Arm(study, arm, starts, grids, results).wanted]


def phases(study: Study, starts: Starts, grids: Grids, results: Results) -> dict[tuple[str, int], list[Phase]]:
    """The phases of the descent so far, by arm and budget."""
    of_arms = {arm: _Arm(study, arm, starts, grids, results).phases for arm in study.arms}
    return {(arm, budget): found for arm, of_arm in of_arms.items() for budget, found in of_arm.items()}


def ends(study: Study, starts: Starts, grids: Grids, results: Results) -> dict[str, Ends]:
    """By arm and budget, the values of further keys at which its descent has ended, or is so far."""
    return {arm: _Arm(study, arm, starts, grids, results).ends for arm in study.arms}


class _Arm:
    """The search of an arm. It goes through rounds. The points of a round depend only on the losses of earlier rounds.
    So a study ends with the same points in whatever order they finish, and after a kill."""

    def __init__(self, study: Study, arm: str, starts: Starts, grids: Grids, results: Results) -> None:
        self._study, self._arm, self._starts, self._grids = study, arm, starts, grids
        self._known, self._losses = ({budget: Trials() for budget in study.search_order} for _ in range(2))
        self.phases: dict[int, list[Phase]] = {}  # of the descent at a budget, so far
        finished = _finished(study, arm, results)
        for point, loss in finished.items():
            self._losses[point.budget].setdefault(point.values, {})[point.seed] = loss
        while True:
            batch = self._round()
            self.wanted = [point for point in batch if point not in finished]
            # Points outside of all rounds, from before a change of the study, count at the end.
            added = batch or [p for p in finished if p.seed not in self._known[p.budget].get(p.values, {})]
            if self.wanted or not added:
                break
            for point in added:
                self._known[point.budget].setdefault(point.values, {})[point.seed] = finished[point]

    @property
    def ends(self) -> Ends:
        return ends_of(asdict(phase) | {"budget": budget} for budget, of in self.phases.items() for phase in of)

    def _keys(self, budget: int) -> Mapping[str, Grid]:
        """The further keys that are tuned at the budget."""
        only = self._study.descent_budget
        return self._grids(self._arm, budget) if only in (None, budget) else {}

    def _lattice(self, budget: int) -> Lattice:
        return Lattice(self._starts(self._arm, budget), self._study.tune[LR])

    def _round(self) -> list[Point]:
        """The next points of the arm. A budget begins after the earlier ones are complete."""
        points: list[Point] = []
        for number, budget in enumerate(self._known):
            if self._known[budget]:
                found = self._next_of_budget(budget)
            elif points:
                break
            else:
                found = self._beginning(budget, {b: self._known[b] for b in self._study.search_order[:number]})
            points += [Point(self._arm, budget, values, seed) for values, seed in found]
        return points

    def _next_of_budget(self, budget: int) -> list[At]:
        lattice, trials, losses = self._lattice(budget), self._known[budget], self._losses[budget]
        if keys := self._keys(budget):
            start = next(iter(trials))
            missing, seen, self.phases[budget] = descend(self._study, lattice, keys, start, losses)
            if new := missing or [(x, seed) for x, of in seen.items() for seed in of if seed not in trials.get(x, {})]:
                return new
        sigma, _ = noise_between_seeds(self._known.values())
        return next_rates(self._study, lattice, self._of_end(budget, trials), sigma)

    def _of_end(self, budget: int, trials: Trials) -> Trials:
        """The trials with the values at which the descent of a budget ended; all without a descent."""
        end = self.ends.get(budget, {})
        return {values: losses for values, losses in trials.items() if end.items() <= dict(values).items()}

    def _beginning(self, budget: int, earlier: Mapping[int, Trials]) -> list[At]:
        """The first points of a budget. Further keys have the best values of the budget before, or their starts."""
        earlier = {b: self._of_end(b, trials) for b, trials in earlier.items()}
        lattice, bests = self._lattice(budget), {b: x for b, trials in earlier.items() if (x := best_values(trials))}
        lr = lattice.nearest(_expected_lr(budget, earlier) or lattice.start)
        if bests:
            at, best = list(bests.items())[-1]
            centre = {key: carried(key, value, budget / at) for key, value in best}
        else:
            centre = {key: grid.values[0] for key, grid in self._grids(self._arm, budget).items()}
        return first_rates(self._study, lattice, sorted_values(centre | {LR: lr}))


def _finished(study: Study, arm: str, results: Results) -> dict[Point, float]:
    """The end losses of an arm's points within the study, with failures as in `Trials`."""
    finished = {}
    for point in sorted(results, key=repr):
        result, keys = results[point], {key for key, _ in point.values}
        if point.arm != arm or point.budget not in study.budgets or point.seed not in study.seeds:
            continue
        if keys == {LR, *study.keys_of(arm)} and result.is_final:
            is_done = result.state == DONE and result.loss is not None and math.isfinite(result.loss)
            is_other = result.reason.startswith(OUT_OF_MEMORY) or result.reason.endswith(CRASHED)
            failure = math.nan if is_other else math.inf
            finished[point] = float(result.loss or 0.0) if is_done else failure
    return finished


def _expected_lr(budget: int, earlier: Mapping[int, Trials]) -> float | None:
    """The best lr at a budget, by a fit of log lr over log budget; with one earlier budget, its best lr."""
    found = {b: tuning for (b, key), tuning in tunings(earlier).items() if key == LR}
    inside = {b: tuning.optimum for b, tuning in found.items() if tuning.optimum is not None}
    if len(inside) > 1:
        fit = statistics.linear_regression([math.log(b) for b in inside], [math.log(lr) for lr in inside.values()])
        return math.exp(fit.slope * math.log(budget) + fit.intercept)
    bests = [*inside.values()] or [tuning.best for tuning in found.values() if tuning.best is not None]
    return bests[-1] if bests else None
