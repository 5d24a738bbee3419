"""Studies whose losses come from a formula: `search` asks for points and answers until none is wanted."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ngpt_train.study.definition import LR, Study
from ngpt_train.study.descent import Grid
from ngpt_train.study.points import DONE, FAILED, Point, Result
from ngpt_train.study.search import Grids, next_points, phases
from ngpt_train.study.tuning import Trials

START = 0.001  # the recipe's learning rate
Loss = Callable[[Point], float | None]  # None: the point diverges


def study(
    budgets: tuple[int, ...] = (1000,),
    seeds: tuple[int, ...] = (0, 1, 2),
    max_points: int = 9,
    arms: tuple[str, ...] = ("gpt",),
    **lists: tuple[object, ...],
) -> Study:
    """lists: further keys of the section optim, by their values."""
    tune = {LR: 2.0} | {f"optim.{key}": values for key, values in lists.items()}
    of_arms: dict[str, tuple[str, ...]] = dict.fromkeys(arms, ())
    return Study("test", Path("studies"), arms[0], of_arms, (), budgets, tune, seeds, max_points=max_points)


def start(arm: str, budget: int) -> float:
    return START


def listed(of: Study) -> Grids:
    return lambda arm, budget: {key: Grid(values[: of.max_points]) for key, values in of.keys_of(arm).items()}


def octaves(point: Point) -> float:
    """The octaves from the recipe's learning rate up to the point's."""
    return math.log2(float(dict(point.values)[LR] or 0) / START)  # type: ignore[arg-type]


def result(point: Point, loss: float | None, reason: str = "diverged at step 3: the loss is nan") -> Result:
    state = FAILED if loss is None else DONE
    return Result(point, state, loss, reason if loss is None else "", Path(point.directory))


def search(
    of: Study,
    loss: Loss,
    order: random.Random | None = None,
    reason: str = "diverged",
    grids_of: Callable[[Study], Grids] = listed,
) -> tuple[dict[Point, Result], list[list[Point]]]:
    """The results at the end of a study, and the wanted points of each round. order: finishes single points in random
    order, and asks again after each."""
    results: dict[Point, Result] = {}
    rounds: list[list[Point]] = []
    while wanted := next_points(of, start, grids_of(of), results):
        rounds.append(wanted)
        for point in [order.choice(wanted)] if order else wanted:
            assert point not in results, "asked again for a finished point"
            results[point] = result(point, loss(point), reason)
        assert len(rounds) < 1000
    return results, rounds


def descent_of(of: Study, results: dict[Point, Result], grids_of: Callable[[Study], Grids]) -> list[dict[str, object]]:
    """All phases, as in descent.json."""
    found = phases(of, start, grids_of(of), results)
    return [{"arm": arm, "budget": budget, **asdict(phase)} for (arm, budget), made in found.items() for phase in made]


def trials(results: dict[Point, Result]) -> dict[int, Trials]:
    found: dict[int, Trials] = {}
    for point, known in results.items():
        loss = math.inf if known.loss is None else known.loss
        found.setdefault(point.budget, {}).setdefault(point.values, {})[point.seed] = loss
    return found


def fixed_noise(sigma: float, key: object, shared: float = 0.0) -> Callable[[Point], float]:
    """Noise of a point, the same whenever it is asked. shared: the part of the variance that a seed's points share."""

    def noise(point: Point) -> float:
        of_seed = random.Random(f"{key} {point.seed}").gauss(0, sigma * math.sqrt(shared))
        return of_seed + random.Random(f"{key} {point}").gauss(0, sigma * math.sqrt(1 - shared))

    return noise
