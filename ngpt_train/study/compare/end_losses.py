"""The baseline's end loss over its budget, from runs that each end their own schedule.

A power law with a floor, monotone, and a line in log x for c -> 0,

    loss(x) = a - b (1 - exp(-c u)) / c,   u = log(x / x_0),   b >= 0,

is refused where the losses say that it is none: they lie off it, or fall faster and faster (c < 0), by more than their
noise. Then straight lines in log x lead from budget to budget. Where they fall faster and faster within the noise, the
fit stays. In both cases nothing is said beyond the budgets.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import minimize_scalar

from ngpt_train.study.compare.noise import Noise, Pair
from ngpt_train.study.compare.phrases import BENDS_DOWN, NO_FORM

BEYOND = 2.0  # factor beyond the baseline's budgets up to which the fit is extrapolated
BENDS = (-1.5, 3.0)  # limits of c
ROUNDING = 1e-6  # nats that are no misfit


@dataclass(frozen=True)
class EndLosses:
    """The fit of the baseline's end loss over its K >= 2 budgets."""

    tokens: np.ndarray  # (K,) ascending
    losses: np.ndarray  # (K,) nats
    counts: np.ndarray  # (K,) runs behind each loss

    @cached_property
    def u(self) -> np.ndarray:
        return self._log(self.tokens)

    def _log(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(tokens)) - float(np.mean(np.log(self.tokens)))

    @cached_property
    def bend(self) -> float:
        """c; 0 for two budgets."""
        if not self.may_bend:
            return 0.0
        grid = np.linspace(*BENDS, 31)
        best = int(np.argmin([self._misfit(c) for c in grid]))
        around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        found = minimize_scalar(self._misfit, bounds=around, method="bounded", options={"xatol": 1e-9})
        return float(found.x)

    def _misfit(self, c: float) -> float:
        design, solution = self._solved(c)
        return float(np.sum(self.counts * (self.losses - design @ solution) ** 2))

    def _solved(self, c: float) -> tuple[np.ndarray, np.ndarray]:
        """The design for this bend, `(K, 2)`, and a and b."""
        design, weight = np.stack([np.ones_like(self.u), -bent(self.u, c)], axis=1), np.sqrt(self.counts)
        return design, np.linalg.lstsq(weight[:, None] * design, weight * self.losses, rcond=None)[0]

    @cached_property
    def coefficients(self) -> np.ndarray:
        """(a, b); b is 0 if the losses do not fall."""
        _, (a, b) = self._solved(self.bend)
        return np.array([a, b]) if b > 0 else np.array([np.average(self.losses, weights=self.counts), 0.0])

    @cached_property
    def square(self) -> np.ndarray:
        """(K,) weights of the losses in the square's coefficient of a parabola over u."""
        design, weight = np.stack([np.ones_like(self.u), self.u, self.u**2], axis=1), np.sqrt(self.counts)
        return np.asarray(np.linalg.pinv(weight[:, None] * design)[2] * weight)

    @property
    def beyond(self) -> float:
        """The factor beyond the budgets up to which the fit is followed."""
        return 1.0 if self.may_bend and self.square @ self.losses < -ROUNDING else BEYOND

    @property
    def note(self) -> str | None:
        if not self.may_bend:
            return "the fit is a line through two budgets, whose error is not known: no interval"
        return None if self.beyond > 1 else BENDS_DOWN

    @property
    def may_bend(self) -> bool:
        return len(self.tokens) > 2

    def is_refused(self, noise: Noise, place: np.ndarray, confidence: float) -> bool:
        """True if a loss lies off the fit, or the losses fall faster and faster, by more than the noise.

        place: (K,) of the noise's budgets among these. Three budgets lie on their fit. K may lie off it in K - 3 ways,
        among which the confidence is divided (Bonferroni)."""
        ways = len(self.tokens) - 3
        off = np.eye(len(self.u)) - self.weights(self.tokens)
        values = np.array([self.square @ self.losses, *(self.losses - self.at(self.tokens))])
        u = np.zeros((len(values), len(place), 2))
        u[:, :, 0] = np.stack([self.square, *off])[:, place]
        below, above = noise.ends(u, 1 - (1 - confidence) / max(ways, 1))
        is_below, is_above = values + above < -ROUNDING, values - below > ROUNDING
        return bool(is_below[0] or (ways > 0 and (is_below | is_above)[1:].any()))

    @property
    def falls(self) -> bool:
        return bool(self.coefficients[1] > 0)

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """The fitted loss."""
        a, b = self.coefficients
        return np.asarray(a - b * bent(self._log(tokens), self.bend))

    def error(self, tokens: np.ndarray) -> np.ndarray:
        """(n,) the error of the form: none is known of a power law; of a line through two budgets it is unbounded."""
        return np.full(len(tokens), 0.0 if self.may_bend else np.inf)

    def weights(self, tokens: np.ndarray) -> np.ndarray:
        """(n, K) derivatives of the fitted loss at n tokens by `losses`."""
        return np.asarray(self._slopes(self._log(tokens)) @ self._response)

    @cached_property
    def _response(self) -> np.ndarray:
        """(3, K) derivatives of the coefficients by the losses."""
        here = self._slopes(self.u)
        return np.asarray(np.linalg.pinv(here.T @ (self.counts[:, None] * here)) @ (here.T * self.counts))

    def _slopes(self, u: np.ndarray) -> np.ndarray:
        """Derivatives of the fit by a, b and, if it is free, c."""
        b, c, small = self.coefficients[1], self.bend, 1e-5
        columns = [np.ones_like(u), -bent(u, c)]
        if self.may_bend and BENDS[0] + 1e-6 < c < BENDS[1] - 1e-6:
            columns.append(-b * (bent(u, c + small) - bent(u, c - small)) / (2 * small))
        return np.stack(columns, axis=1)


def bent(u: np.ndarray, c: float) -> np.ndarray:
    """(1 - exp(-c u)) / c; u for c = 0."""
    return u if abs(c) < 1e-7 else -np.expm1(-c * u) / c


@dataclass(frozen=True)
class Between:
    """Lines in log tokens from each budget of the baseline to the next, K >= 3."""

    tokens: np.ndarray  # (K,) ascending
    losses: np.ndarray  # (K,) nats
    beyond: float = 1.0
    may_bend: bool = False
    note: str = NO_FORM

    @property
    def falls(self) -> bool:
        return bool(self.losses[-1] < self.losses[0])

    def at(self, tokens: np.ndarray) -> np.ndarray:
        return np.interp(np.log(tokens), np.log(self.tokens), self.losses)

    def error(self, tokens: np.ndarray) -> np.ndarray:
        """(n,) how far the loss may lie off the line at most, by its form: (x - x_k) (x_k+1 - x) / 2 times the largest
        second derivative, in x = log tokens, that the budgets show."""
        knots, x = np.log(self.tokens), np.log(tokens)
        slopes = np.diff(self.losses) / np.diff(knots)
        second = np.max(np.abs(np.diff(slopes)) / ((knots[2:] - knots[:-2]) / 2))
        k = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(slopes) - 1)
        return np.asarray(np.maximum((x - knots[k]) * (knots[k + 1] - x), 0) / 2 * second)

    def weights(self, tokens: np.ndarray) -> np.ndarray:
        """(n, K) shares of the losses in the line."""
        x = np.log(tokens)
        return np.stack([np.interp(x, np.log(self.tokens), row) for row in np.eye(len(self.tokens))], axis=1)


def end_losses(pair: Pair, noise: Noise, confidence: float) -> tuple[EndLosses | Between, np.ndarray]:
    """The curve through the baseline's paired runs and its further budgets; and the place of each budget on it,
    `(K + M,)`, further ones last. noise: `Noise(pair)`."""
    losses = np.nanmean(np.where(np.isnan(pair.difference), np.nan, pair.baseline), axis=1)
    budgets = pair.budgets
    if (more := pair.further) is not None:
        losses = np.concatenate([losses, np.nanmean(more.losses, axis=1)])
        budgets = np.concatenate([budgets, more.budgets])
    order = np.argsort(budgets)
    place, curve = np.argsort(order), EndLosses(budgets[order], losses[order], noise.n_seeds[order])
    if not curve.may_bend:
        return curve, place
    if curve.is_refused(noise, place, confidence):
        return Between(curve.tokens, curve.losses), place
    return curve, place
