"""The search for an arm's learning rate at a budget, its other keys fixed."""

from __future__ import annotations

import math
from functools import cache

from ngpt_train.config.architectures import all_keys
from ngpt_train.study.definition import LR, Study
from ngpt_train.study.tuning import Line, Trials, Values, best_values, changed, line_of, vertex_of

At = tuple[Values, int]  # values and seed of a run


def first_rates(study: Study, lattice: Lattice, centre: Values) -> list[At]:
    """The first runs: a centre and its two neighbours in lr."""
    lr = dict(centre)[LR]
    rates = [lr, *lattice.neighbours(lr)][: study.max_points]
    return [(changed(centre, LR, rate), study.seeds[0]) for rate in rates]


def next_rates(study: Study, lattice: Lattice, trials: Trials, sigma: float) -> list[At]:
    """The missing runs around the best point: neighbours in lr, rates between them, its other seeds, worse points on
    both sides. A better point among them is the best of the next round."""
    first = study.seeds[0]
    best = best_values(trials)
    if best is None:
        room = study.max_points - len(trials)
        if room <= 0 or not any(math.inf in losses.values() for losses in trials.values()):
            return []
        lowest = min(trials, key=lambda values: (dict(values)[LR], repr(values)))  # the rates are too high
        return [(changed(lowest, LR, lattice.below(dict(lowest)[LR])), first)]
    line = line_of(trials, LR, best)
    room = max(0, study.max_points - len(line.values))
    neighbours = [lr for lr in lattice.neighbours(dict(best)[LR]) if lr not in line.values][:room]
    if neighbours:
        return [(changed(best, LR, lr), first) for lr in neighbours]
    if study.refine and (finer := [lr for lr in lattice.between(line) if lr not in line.values][:room]):
        return [(changed(best, LR, lr), first) for lr in finer]
    if absent := [seed for seed in study.seeds if seed not in trials[best]]:
        return [(best, seed) for seed in absent]
    below, above = line.worse(sigma)
    outwards: list[float | None] = [] if below else [lattice.below(line.values[0])]
    outwards += [] if above else [lattice.above(line.values[-1])]
    return [(changed(best, LR, lr), first) for lr in [lr for lr in outwards if lr is not None][:room]]


@cache
def _highest() -> float:
    """The highest rate that the key allows. Building all keys takes a millisecond, too long for each lattice."""
    return all_keys()[LR].maximum or math.inf


class Lattice:
    """The tried rates: the recipe's times powers of the factor, in six digits, like the names of runs."""

    def __init__(self, start: float, factor: float) -> None:
        self.start, self._factor = start, factor

    def below(self, lr: float) -> float:
        """The highest rate below `lr`. `lr` itself may lie between two rates."""
        return self._at(math.ceil(self._power(lr) - 1e-4) - 1)

    def above(self, lr: float) -> float | None:
        rate = self._at(math.floor(self._power(lr) + 1e-4) + 1)
        return rate if rate <= _highest() else None

    def nearest(self, lr: float) -> float:
        return self._at(round(self._power(lr)))

    def neighbours(self, lr: float) -> list[float]:
        return [rate for rate in (self.below(lr), self.above(lr)) if rate is not None]

    def between(self, line: Line) -> list[float]:
        """The rates to try between those of the factor, once the best has worse ones on both sides: of the lattice of
        the factor's root the one nearest to the parabola's vertex, which may be the best itself, or both neighbours of
        the best if there is no parabola."""
        below, above = line.worse(0.0)
        if not below or not above:
            return []
        finer = Lattice(self.start, math.sqrt(self._factor))
        vertex = vertex_of(line, max(below), min(above), 0.0)
        return finer.neighbours(line.best) if vertex is None else [finer.nearest(vertex[0])]

    def _power(self, lr: float) -> float:
        return math.log(lr / self.start) / math.log(self._factor)

    def _at(self, power: int) -> float:
        return float(f"{self.start * self._factor**power:.6g}")
