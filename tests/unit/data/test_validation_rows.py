"""Validation rows: always the same, enough of them, and the same text at every context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.permutation import permuted
from ngpt_train.data.rows import Batch, chosen_rows, rows_of, same_text

CONTEXT, EOS = 32, 4321


def config(*options: str) -> Config:
    return load_config(["model=gpt", "scale=debug", f"model.context={CONTEXT}", "data=local", "data.path=x", *options])


def held_out(n: int) -> Tokens:
    """The ids 0 to n - 1 modulo 4000, in documents of 50."""
    ids = (np.arange(n) % 4000).astype(np.uint16)
    return Tokens("validation", Path("tokens"), [ids], EOS, [np.append(np.arange(0, n, 50), n)])


def places(tokens: Tokens, given: Config, chosen: NDArray[np.int64]) -> list[int]:
    """The places in the text of all targets of the chosen rows."""
    _, targets, *_ = rows_of(tokens, given).batch(np.sort(chosen))
    counted = np.arange(len(tokens))
    last = len(tokens) - given.model.context
    found = []
    for index, row in zip(np.sort(chosen), targets, strict=True):
        start = min(index * given.model.context, last)
        found += counted[start : start + given.model.context][row != -100].tolist()
    return found


@pytest.mark.parametrize("seed", [0, 7])
def test_rows_are_those_of_before_and_do_not_depend_on_the_run(seed: int) -> None:
    """Caught: other rows than earlier versions had, so that their losses cannot be compared; rows of run.seed."""
    given = config("eval.rows=50", f"run.seed={seed}")
    chosen = chosen_rows(rows_of(held_out(9990), given), given)
    assert set(chosen.tolist()) == set(permuted(np.arange(50), 313, 0).tolist())
    few = config("eval.rows=1000")
    assert set(chosen_rows(rows_of(held_out(9990), few), few).tolist()) == set(range(313))


@pytest.mark.parametrize("wanted", [1, 32, 33, 40_000, 65_000, 10**9])
def test_tokens_are_enough_and_no_row_too_many(wanted: int) -> None:
    """Caught: a last row too many or too few; rows twice where the split is too short."""
    given, tokens = config(f"eval.tokens={wanted}"), held_out(65_537)
    rows = rows_of(tokens, given)
    chosen = chosen_rows(rows, given)

    def counted(indices: NDArray[np.int64]) -> int:
        return len(places(tokens, given, indices)) if len(indices) else 0

    if wanted > len(tokens):
        assert sorted(chosen.tolist()) == list(range(len(rows)))
    else:
        assert counted(chosen) >= wanted > counted(chosen[:-1])


class HalfPadded:
    """1,000 rows of 32 targets, 16 of them padding."""

    def __len__(self) -> int:
        return 1000

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        targets = np.where(np.arange(CONTEXT) < 16, indices[:, None], -100)
        return targets, targets


def test_targets_that_do_not_count_are_not_counted() -> None:
    """Caught: padding taken for targets; documents drawn in blocks of neighbours, which are alike."""
    chosen = chosen_rows(HalfPadded(), config("eval.tokens=1600"))
    assert len(chosen) == 100
    assert (np.diff(chosen) == 1).sum() < 10


@pytest.mark.parametrize("other", [16, 32, 64, 128])
def test_other_contexts_have_the_same_text(other: int) -> None:
    """With eval.tokens, whose blocks each context cuts: the same targets. Caught: rows drawn anew for each context."""
    tokens, given = held_out(200_000), config("eval.tokens=65536")
    chosen = chosen_rows(rows_of(tokens, given), given)
    at_other = replace(given, model=replace(given.model, context=other))
    found = same_text(chosen, CONTEXT, other, len(rows_of(tokens, at_other)))
    assert len(set(found.tolist())) == len(found)
    assert places(tokens, at_other, found) == places(tokens, given, chosen)


def test_longer_rows_begin_with_the_text_of_single_ones() -> None:
    """eval.rows draws rows one by one, so a longer row has a chosen row and its neighbours, and there are as many
    targets; at the end of the text, too."""
    assert same_text(np.array([9, 0, 4, 1]), 32, 64, n_other=5).tolist() == [4, 0]
    assert same_text(np.array([9, 0]), 32, 16, n_other=20).tolist() == [18, 19, 0, 1]
    assert same_text(np.array([5, 2]), 32, 48, n_other=7).tolist() == [3, 1]
    assert same_text(np.arange(10), 32, 64, n_other=5).tolist() == [0, 1, 2, 3, 4]
