"""Coordinate descent over an arm's keys at a budget: the learning rate, then each further key, then the rate again,
until no key gains more than the noise between seeds, alone, with others or at another rate, or the budget of runs is
used up."""

import math
import statistics
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_json
from ngpt_train.core.recorded import COUNT, FIX, NUMBER, TEXT, all_checked
from ngpt_train.study.definition import LR, Study
from ngpt_train.study.rates import At, Lattice, first_rates, next_rates
from ngpt_train.study.tuning import (
    Trials,
    Values,
    best_values,
    changed,
    is_number,
    noise_between_seeds,
    place_of,
    sorted_values,
    without,
)

GAINED, WITHIN_NOISE, OUT_OF_RUNS = "gained", "within_noise", "out_of_runs"
FILE = "descent.json"  # in the study's directory: the phases of all arms
_FIELDS = {"arm": TEXT, "budget": COUNT, "key": TEXT, "gain": NUMBER, "noise": NUMBER, "n_seeds": COUNT, "runs": COUNT}


@dataclass(frozen=True)
class Grid:
    """The values of a further key for an arm at a budget; the first is where the search begins. outward: numbers, of
    which only those beside the best are tried. Else all are."""

    values: tuple[Any, ...]
    outward: bool = False

    def beside(self, value: Any) -> list[Any]:
        if not self.outward:
            return [other for other in self.values if other != value]
        below = [other for other in self.values if other < value]
        above = [other for other in self.values if other > value]
        return [*([max(below)] if below else []), *([min(above)] if above else [])]


@dataclass(frozen=True)
class Phase:
    """The tuning of one key with the others fixed.

    key, start, end: of a phase that changed several keys at once their names, with commas, and lists of their values.
    start, end: its values; where nothing gained, end is the best value tried beside the start. gain: by how much the
    end loss fell from start to end, a mean over their n_seeds shared seeds, of one further key without the seed that
    chose it; None if unknown, or if the start fails.
    noise: between seeds, so far; None if unknown. runs: made for it.
    """

    key: str
    start: Any
    end: Any
    gain: float | None
    noise: float | None
    n_seeds: int
    runs: int
    state: str


@dataclass(frozen=True)
class _Corner:
    """A value and a rate beside those of the best point. Its loss is flat + bend * turn, with a bend of each key
    that is 0 where the best rate does not move with the key."""

    key: str
    values: Values
    flat: float
    turn: float


def write_phases(directory: Path, phases: Mapping[tuple[str, int], Sequence[Phase]]) -> None:
    """Writes descent.json, a list of the phases with their arms and budgets."""
    at = [({"arm": arm, "budget": budget}, phase) for (arm, budget), of in phases.items() for phase in of]
    write_json(directory / FILE, [where | asdict(phase) for where, phase in at])


def read_phases(directory: Path) -> list[dict[str, Any]]:
    """The content of descent.json; empty without one. Raises DataError for a damaged file."""
    path = directory / FILE
    if not path.exists():
        return []
    found = all_checked(read_json(path), _FIELDS | {"state": TEXT}, str(path), ("arm", "budget", "key", "state"))
    for number, phase in enumerate(found):
        n_keys, sides = phase["key"].count(", ") + 1, ("start", "end") if phase["state"] == GAINED else ("start",)
        for side in sides if n_keys > 1 else ():
            if not isinstance(values := phase.get(side), list) or len(values) != n_keys:
                raise DataError(f"{path}[{number}]: {side} has no value for each of {phase['key']}. {FIX}")
    return found


def ends_of(phases: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """By budget, the values of further keys at which an arm's descent has ended. phases: as in descent.json."""
    found: dict[int, dict[str, Any]] = {}
    for phase in phases:
        keys = phase["key"].split(", ")
        values: Any = phase.get("end" if phase["state"] == GAINED else "start")
        of_budget = found.setdefault(phase["budget"], {})
        of_budget |= zip(keys, values if len(keys) > 1 else [values], strict=True)
        of_budget.pop(LR, None)
    return found


def descend(
    study: Study, lattice: Lattice, grids: Mapping[str, Grid], start: Values, losses: Trials
) -> tuple[list[At], Trials, list[Phase]]:
    """The runs that a descent from `start` needs and `losses` lacks; the trials and the phases before them. It is made
    anew from the losses it asks for, in its own order, so no other and no later loss changes what it has done."""
    descent = _Descent(study, lattice, grids)
    for batch in descent.phases_from(start):
        if missing := [(values, seed) for values, seed in batch if seed not in losses.get(values, {})]:
            return missing, descent.seen, descent.phases
        for values, seed in batch:
            descent.seen.setdefault(values, {})[seed] = losses[values][seed]
    return [], descent.seen, descent.phases


def _most_gain(of_key: Sequence[float], of_rate: Sequence[float]) -> float:
    """The gain of a corner in the steepest convex valley, from the losses of steps to both sides less the start's: with
    slopes s and curvatures c, |s_key| + |s_rate| - (sqrt(c_key) - sqrt(c_rate))². Infinite if a side is not known."""
    if min(len(of_key), len(of_rate)) < 2:
        return math.inf
    slopes = [abs(below - above) / 2 for below, above in (of_key, of_rate)]
    roots = [math.sqrt(max(0.0, below + above) / 2) for below, above in (of_key, of_rate)]
    return sum(slopes) - (roots[0] - roots[1]) ** 2


class _Descent:
    """Its methods yield runs, and go on once `seen` has their losses."""

    def __init__(self, study: Study, lattice: Lattice, grids: Mapping[str, Grid]) -> None:
        self._study, self._lattice, self._grids = study, lattice, grids
        self.seen: Trials = {}
        self.phases: list[Phase] = []
        self._is_out = False  # of runs

    def phases_from(self, start: Values) -> Generator[list[At], None, None]:
        best = yield from self._rate(start)
        while best is not None:
            before = best
            for key in self._grids:
                best = yield from self._key(best, key)
            if best == before:
                best = yield from self._at_once(best)
            if best == before:
                best = yield from self._with_the_rate(best)
            if best == before:
                return
            best = yield from self._rate(best)
            if self._is_out:
                return

    def _rate(self, start: Values) -> Generator[list[At], None, Values | None]:
        """Tunes the rate to its end, also once the budget of runs is used up: an arm is compared at a tuned rate."""
        n_runs, line = self._n_runs(), self._line(start)
        batch = self._new(first_rates(self._study, self._lattice, start))
        batch = batch or next_rates(self._study, self._lattice, line, self._noise() or 0.0)
        while batch:
            yield batch
            batch = next_rates(self._study, self._lattice, self._line(start), self._noise() or 0.0)
        best = best_values(self._line(start))
        if best is not None:
            gain, _ = self._gain(start, best)
            gained = gain is not None and gain > (self._noise() or 0.0)
            self._say([LR], start, best, n_runs, GAINED if gained else WITHIN_NOISE)
        return best

    def _key(self, start: Values, key: str) -> Generator[list[At], None, Values]:
        """Goes to better values as long as one gains more than the noise. The first seed chooses the value. One that is
        better with it gets the other seeds, which alone say what it gains."""
        n_runs, best, other, is_out = self._n_runs(), start, None, False
        first, *others = self._study.seeds
        while True:
            beside = [changed(best, key, value) for value in self._grids[key].beside(dict(best)[key])]
            is_out = not (yield from self._made([(values, first) for values in beside]))
            known = [v for v in beside if v in self.seen and math.isfinite(self.seen[v][first])]
            other = min(known, key=lambda values: self.seen[values][first], default=None)
            if is_out or other is None or self.seen[other][first] >= self.seen[best][first]:
                break
            is_out = not (yield from self._made([(other, seed) for seed in others]))
            gain, _ = self._gain(best, other, but=first)
            if is_out or gain is None or gain <= (self._noise() or 0.0):
                break
            best = other
        state = GAINED if best != start else OUT_OF_RUNS if is_out else WITHIN_NOISE
        self._say([key], start, best if best != start else other, n_runs, state, but=first)
        self._is_out |= is_out
        return best

    def _at_once(self, start: Values) -> Generator[list[At], None, Values]:
        """Goes to all values at once that alone were better over the seeds that did not choose them, though by less
        than the noise, if together they gain more than it, over all seeds: none of them chose this point."""
        n_runs, seeds, better = self._n_runs(), self._study.seeds, {}
        for key in self._grids:
            tried = [changed(start, key, value) for value in self._grids[key].beside(dict(start)[key])]
            known = [values for values in tried if len(self.seen.get(values, {})) == len(seeds)]
            gains = {values: self._gain(start, values, but=seeds[0])[0] or 0.0 for values in known}
            best = max(gains, key=lambda values: gains[values], default=start)
            if gains.get(best, 0.0) > 0:
                better[key] = dict(best)[key]
        if len(better) < 2:
            return start
        together = sorted_values(dict(start) | better)
        if not (yield from self._made([(together, seed) for seed in seeds])):
            self._say(list(better), start, None, n_runs, OUT_OF_RUNS)
            return start
        gain, _ = self._gain(start, together)
        state = GAINED if gain is not None and gain > (self._noise() or 0.0) else WITHIN_NOISE
        self._say(list(better), start, together, n_runs, state)
        return together if state == GAINED else start

    def _with_the_rate(self, start: Values) -> Generator[list[At], None, Values]:
        """Goes along a valley in which the best rate moves with a key, so that neither gains alone. The first seed runs
        a corner of each key, which shows the key's bend, and another one where that promises a gain. It chooses the
        best corner; the other seeds alone say what it gains."""
        n_runs, (first, *others) = self._n_runs(), self._study.seeds
        corners = [of_bend for key in self._grids for of_bend in self._corners(start, key)]
        if not corners:
            return start
        tried = [min(of_bend, key=lambda corner: corner.flat) for of_bend in corners]
        is_out = not (yield from self._made([(corner.values, first) for corner in tried]))
        if not is_out:
            for corner, of_bend in zip(list(tried), corners, strict=True):
                bend = (self._of_first(corner.values) - corner.flat) / corner.turn
                expected = {other: other.flat + bend * other.turn for other in of_bend if other != corner}
                if expected and min(expected.values()) < self._of_first(start) + 2 * (self._noise() or 0.0):
                    tried.append(min(expected, key=lambda other: expected[other]))
            is_out = not (yield from self._made([(corner.values, first) for corner in tried]))
        best = min(tried, key=lambda corner: self._of_first(corner.values))
        if not is_out and self._of_first(best.values) < self._of_first(start):
            is_out = not (yield from self._made([(best.values, seed) for seed in others]))
            gain, _ = self._gain(start, best.values, but=first)
            if not is_out and gain is not None and gain > (self._noise() or 0.0):
                self._say([best.key, LR], start, best.values, n_runs, GAINED, but=first)
                return best.values
        keys = [*dict.fromkeys(of_bend[0].key for of_bend in corners), LR]
        end = best.values if best.values in self.seen else None
        self._say(keys, start, end, n_runs, OUT_OF_RUNS if is_out else WITHIN_NOISE, but=first)
        return start

    def _corners(self, start: Values, key: str) -> list[list[_Corner]]:
        """The corners of a key by its bends: numbers have one, words and pairs each their own. None without a gain."""
        at, place, lr = self._of_first(start), place_of(start, key), dict(start)[LR]
        tried = [changed(start, key, value) for value in self._grids[key].beside(dict(start)[key])]
        rates = self._neighbours(start, LR, self._line(start))
        if not is_number(place):
            bends = [[values] for values in tried if math.isfinite(self._of_first(values))]
        else:
            bends = [self._neighbours(start, key, tried)]
            steps = [[self._of_first(values) - at for values in sides] for sides in (*bends, rates)]
            if _most_gain(*steps) <= (self._noise() or 0.0):
                return []

        def corner(values: Values, of_rate: Values) -> _Corner:
            rate, is_below = dict(of_rate)[LR], is_number(place) and place_of(values, key) < place
            turn = math.log2(rate / lr) * (-1 if is_below else 1)
            flat = self._of_first(values) + self._of_first(of_rate) - at
            return _Corner(key, changed(values, LR, rate), flat, turn)

        return [[corner(*pair) for pair in product(of_bend, rates)] for of_bend in bends if of_bend and rates]

    def _neighbours(self, start: Values, key: str, tried: Iterable[Values]) -> list[Values]:
        """Of the tried values with a finite loss the nearest numbers below and above the start's."""
        at = place_of(start, key)
        places = {place_of(values, key): values for values in tried if math.isfinite(self._of_first(values))}
        numbers = sorted(place for place in places if is_number(place))
        nearest = [place for place in numbers if place < at][-1:] + [place for place in numbers if place > at][:1]
        return [places[place] for place in nearest]

    def _of_first(self, values: Values) -> float:
        """The loss of the first seed; infinite without one."""
        loss = self.seen.get(values, {}).get(self._study.seeds[0], math.inf)
        return loss if math.isfinite(loss) else math.inf

    def _made(self, batch: Sequence[At]) -> Generator[list[At], None, bool]:
        """Has the runs made; False if they are more than the budget of runs."""
        new, study = self._new(batch), self._study
        values = {*self.seen, *(values for values, _ in new)}
        limit = math.inf if study.descent_runs is None else study.descent_runs
        if new and (self._n_runs() + len(new) > limit or len(values) > study.max_points * (1 + len(self._grids))):
            return False
        if new:
            yield new
        return True

    def _new(self, batch: Sequence[At]) -> list[At]:
        return [(values, seed) for values, seed in batch if seed not in self.seen.get(values, {})]

    def _line(self, values: Values) -> Trials:
        """The trials of all rates at the other keys' values."""
        return {x: losses for x, losses in self.seen.items() if without(x, LR) == without(values, LR)}

    def _n_runs(self) -> int:
        return sum(map(len, self.seen.values()))

    def _noise(self) -> float | None:
        sigma, degrees = noise_between_seeds([self.seen])
        return sigma if degrees else None

    def _gain(self, start: Values, end: Values, but: int | None = None) -> tuple[float | None, int]:
        """The gain and its number of seeds. Infinite where a seed fails at the start alone; None where one fails at the
        end, or no seed is shared. but: a seed that does not count where there are others."""
        shared = [seed for seed in self.seen.get(start, {}) if seed in self.seen[end]]
        shared = [seed for seed in shared if seed != but] or shared
        gains = [self.seen[start][seed] - self.seen[end][seed] for seed in shared]
        gain = statistics.fmean(gains) if gains else math.nan
        return (None if math.isnan(gain) or gain == -math.inf else gain), len(gains)

    def _say(
        self, keys: list[str], start: Values, end: Values | None, n_runs: int, state: str, but: int | None = None
    ) -> None:
        def said(values: Values) -> Any:
            return dict(values)[keys[0]] if len(keys) == 1 else [dict(values)[key] for key in keys]

        gain, n_seeds = (None, 0) if end is None else self._gain(start, end, but)
        gain = None if gain == math.inf else gain
        to, runs = None if end is None else said(end), self._n_runs() - n_runs
        self.phases.append(Phase(", ".join(keys), said(start), to, gain, self._noise(), n_seeds, runs, state))
