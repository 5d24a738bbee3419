"""Whole studies with planted truths: losses go through the search, run directories' records and the statistics of
`compare`, in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.study.compare.runs import Run
from ngpt_train.study.compare.trials import Arm, read_arm
from ngpt_train.study.compare.versus import versus
from ngpt_train.study.definition import Study
from ngpt_train.study.points import Point
from tests.unit.study.searches import descent_of, listed, octaves, search, study

FIRST = 409_600  # tokens
ARMS = ("gpt", "ngpt")
KEY = "optim.clip_norm"


def like_gpt(x: float) -> float:
    """End losses 5.0, 4.2, 3.6, 3.2 at the four budgets; x: tokens over FIRST."""
    return float(1.35 + 3.65 * x**-0.325)


def plateau_first(x: float) -> float:
    """Losses that fall faster and faster, then slower: 5.0, 4.65, 3.97, 3.31."""
    return float(5.2 - 2.6 / (1 + math.exp(-1.2 * (math.log2(x) - 2.1))))


def faster_and_faster(x: float) -> float:
    """Steps of 0.53, 0.66 and 0.73 nats, as GPT's with 8 million parameters, then smaller ones."""
    return float(7.2 - 5.3 / (1 + math.exp(-0.55 * (math.log2(x) - 2.6))))


@dataclass(frozen=True)
class Case:
    """Two arms at budgets that double. The arm needs `ratio` times fewer tokens than the baseline, when each trains at
    its best learning rate."""

    ratio: float | tuple[float, ...] = 1.0  # or at each budget
    sigma: float | tuple[float, ...] = 0.03  # standard deviation between seeds, or at each budget
    curve: Callable[[float], float] = like_gpt
    n_budgets: int = 4
    seeds: tuple[int, int] = (3, 3)  # of baseline and arm
    tails: float = math.inf  # degrees of freedom of the noise
    max_points: int = 9  # 1: the rate is fixed
    best: tuple[float, float] = (0.0, 0.0)  # octaves from the start to the best rate of baseline and arm
    drift: tuple[float, float] = (0.0, 0.0)  # of the best rate, octaves for each doubling
    price: tuple[float, float] = (0.1, 0.1)  # nats at an octave from the best rate
    diverges: bool = False  # seed 2 of the arm, at rates from its best one on
    # A further key, with a list in factors of two: nats at an octave from its best value, octaves from the first value
    # to the best one, each of baseline and arm. Without a price there is no such key.
    key_price: tuple[float, float] = (0.0, 0.0)
    key_best: tuple[float, float] = (0.0, 0.0)
    valley: float = 0.0  # octaves by which an octave of the arm's key moves its best rate

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(FIRST * 2**k for k in range(self.n_budgets))

    def ratio_at(self, k: int) -> float:
        return self.ratio[k] if isinstance(self.ratio, tuple) else self.ratio

    def loss(self, side: int, k: int) -> float:
        """Of an arm at budget k and its best rate; side: 0 the baseline, 1 the arm."""
        return self.curve(2**k * (self.ratio_at(k) if side else 1.0))

    def draw(self, rng: np.random.Generator) -> list[Arm]:
        """Both arms of a study after its end."""
        return [self._arm(side, rng) for side in (0, 1)]

    def _arm(self, side: int, rng: np.random.Generator) -> Arm:
        def loss(point: Point) -> float | None:
            k = self.budgets.index(point.budget)
            of_key = math.log2(dict(point.values).get(KEY, 1.0))
            off = octaves(point) - self.best[side] - self.drift[side] * k - side * self.valley * of_key
            if side and self.diverges and point.seed == 2 and off > -0.2:
                return None
            sigma = self.sigma[k] if isinstance(self.sigma, tuple) else self.sigma
            of_run = rng.normal() if self.tails == math.inf else rng.standard_t(self.tails)
            of_run *= 1 if self.tails == math.inf else math.sqrt((self.tails - 2) / self.tails)
            lost = self.price[side] * off**2 + self.key_price[side] * (of_key - self.key_best[side]) ** 2
            return self.loss(side, k) + lost + sigma * of_run

        of = self._study(side)
        results, _ = search(of, loss)
        runs = [run_of(point, result.loss) for point, result in results.items()]
        budgets = {run.path: point.budget for run, point in zip(runs, results, strict=True)}
        return read_arm(ARMS[side], runs, budgets, of.tuned_keys, "loss", 0.95, descent_of(of, results, listed))

    def _study(self, side: int) -> Study:
        lists = {KEY.removeprefix("optim."): (1.0, 0.5, 2.0, 4.0)} if any(self.key_price) else {}
        of = study(self.budgets, tuple(range(self.seeds[side])), self.max_points, (ARMS[side],), **lists)
        return replace(of, baseline=ARMS[side])


def run_of(point: Point, loss: float | None) -> Run:
    steps = point.budget // 4096
    config = {"train.steps": steps, "run.seed": point.seed, **dict(point.values)}
    evals = [{"step": steps, "tokens": point.budget, "loss": loss}]
    end = {"code": 4, "step": 3, "reason": "the loss is nan"} if loss is None else {"code": 0, "reason": "done"}
    return Run(Path("simulated") / point.directory, config, [], [], [], evals if loss is not None else [], end)


@dataclass
class Found:
    """What intervals of many studies held."""

    difference: np.ndarray  # (K,) shares that held the truth
    ratio: np.ndarray
    known: np.ndarray  # (K,) shares of studies with an estimate of the ratio
    width: np.ndarray  # (K,) mean width of the difference's interval, nats
    bias: np.ndarray  # (K,) mean error of log ratio
    trend: float  # share that held the truth, of the known ones
    trends: float  # share of known trends
    verdicts: dict[str, float]

    def __str__(self) -> str:
        rows = {name: np.round(getattr(self, name), 2) for name in ("difference", "ratio", "known", "bias")}
        rows |= {"width": np.round(self.width, 3)}
        return f"{rows} trend {self.trend:.2f} of {self.trends:.2f} {self.verdicts}"


def simulate(case: Case, draws: int, seed: int = 0) -> Found:
    rng, n = np.random.default_rng(seed), case.n_budgets
    hits: list[list[Sequence[float]]] = [[] for _ in range(n)]
    trends, verdicts = [], Counter[str]()
    slope = np.polyfit(np.arange(n), np.log([case.ratio_at(k) for k in range(n)]), 1)[0] if n > 1 else 0.0
    for _ in range(draws):
        baseline, arm = case.draw(rng)
        runs = {x.name: [trial.run for trial in x.trials] for x in (baseline, arm)}
        found = versus(arm, baseline, runs, "loss", 0.95, {})
        verdicts[found["verdict"]] += 1
        of_tokens = {x["budget"]: x for x in found["speedups"] if (x["unit"], x["how"]) == ("tokens", "annealed")}
        for entry in found["differences"]:
            k = case.budgets.index(entry["budget"])
            truth, ratio = case.loss(1, k) - case.loss(0, k), of_tokens[entry["budget"]]
            error = math.nan if ratio["estimate"] is None else math.log(ratio["estimate"] / case.ratio_at(k))
            held = [_holds(entry, truth), _holds(ratio, case.ratio_at(k)), entry["high"] - entry["low"], error]
            hits[k].append(held)
        trends += [_holds(x, math.exp(slope)) for x in found["trends"]]
    table = [np.array(of, float) for of in hits]
    columns = [np.array([of[:, k].mean() for of in table]) for k in range(3)]
    known = np.array([np.mean(~np.isnan(of[:, 3])) for of in table])
    bias = np.array([np.nanmean(of[:, 3]) if (~np.isnan(of[:, 3])).any() else math.nan for of in table])
    shares = {word: count / draws for word, count in verdicts.items()}
    trend = float(np.mean(trends)) if trends else math.nan
    return Found(columns[0], columns[1], known, columns[2], bias, trend, len(trends) / draws, shares)


def _holds(entry: dict[str, Any], truth: float) -> bool:
    low, high = entry["low"], entry["high"]
    return bool((low is None or low <= truth) and (high is None or truth <= high))
