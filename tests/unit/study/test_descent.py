"""The descent over further keys, on planted surfaces, and from a study's definition to its report."""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.study.begun_study import check_stored
from ngpt_train.study.compare.comparison import choose_arms, make_report
from ngpt_train.study.compare.given_runs import gather
from ngpt_train.study.compare.output.comparison_page import html
from ngpt_train.study.compare.output.document import document
from ngpt_train.study.cost import cost_of_phases, rehearsal
from ngpt_train.study.definition import LR, Study, read_stored, write_study
from ngpt_train.study.descent import GAINED, OUT_OF_RUNS, WITHIN_NOISE, Grid, Phase, ends_of, read_phases, write_phases
from ngpt_train.study.points import DONE, Point, Result, Runs
from ngpt_train.study.runner import Runner
from ngpt_train.study.search import Grids, phases
from ngpt_train.study.tuning import best_values, tunings
from tests.unit.study.searches import START, fixed_noise, search, start, study, trials
from tests.unit.study.small_study import YAML, FakeEngine, Heard, leave, study_of

CLIP, EPS = "optim.clip_norm", "optim.eps"
GRID = Grid((1.0, 0.5, 0.25, 0.125, 2.0, 4.0, 8.0), outward=True)
Loss = Callable[[dict[str, float], Point], float | None]


def descent(**changes: Any) -> Study:
    tune = {LR: 2.0, CLIP: 2.0, EPS: 2.0}
    return replace(study(), **({"tune": tune} | changes))


def grids(of: Study) -> Grids:
    return lambda arm, budget: {k: GRID if isinstance(x, float) else Grid(x) for k, x in of.keys_of(arm).items()}


def run(
    of: Study, loss: Loss, order: random.Random | None = None
) -> tuple[dict[Point, Result], dict[tuple[str, int], list[Phase]]]:
    """All results and phases. loss: of octaves from START and from 1, by key. order: as in `search`."""

    def of_point(point: Point) -> float | None:
        return loss({k: math.log2(v / (START if k == LR else 1)) for k, v in point.values if type(v) is float}, point)

    results, _ = search(of, of_point, order, grids_of=grids)
    return results, phases(of, start, grids(of), results)


def best_of(results: dict[Point, Result], budget: int = 1000) -> dict[str, Any]:
    return dict(best_values(trials(results)[budget], complete=True) or ())


def test_keys_that_depend_on_each_other_reach_their_best_values() -> None:
    """Caught: a key that is tried at the first rate alone; a rate that is not tuned again after a key; a descent that
    ends before no key gains, or goes on after that; a phase without its gain."""

    def loss(x: dict[str, float], point: Point) -> float:
        noise = {0: 0.0, 1: 0.002, 2: -0.002}[point.seed]
        return (
            3 + 0.1 * (x[LR] - 1 - 0.5 * x[CLIP]) ** 2 + 0.08 * (x[CLIP] + 2) ** 2 + 0.05 * (x[EPS] - 0.1) ** 2 + noise
        )

    results, found = run(descent(), loss)
    assert best_of(results) == {LR: START, CLIP: 0.25, EPS: 1.0}
    of = found["gpt", 1000]
    assert [phase.key for phase in of] == [LR, CLIP, EPS, LR, *[CLIP, EPS, LR] * ((len(of) - 6) // 3), CLIP, EPS]
    assert [phase.state for phase in of if phase.key == EPS] == [WITHIN_NOISE] * (len(of) // 3)
    assert [phase.state for phase in of[-2:]] == [WITHIN_NOISE] * 2
    rate, clip = of[:2]
    assert (rate.start, rate.end, rate.state, rate.n_seeds) == (START, 2 * START, GAINED, 1)
    assert rate.gain == pytest.approx(0.1)
    assert (clip.start, clip.end, clip.state, clip.n_seeds) == (1.0, 0.25, GAINED, 2)  # the first seed chose it
    assert clip.gain == pytest.approx(0.08 * 4 - 0.1)
    assert clip.noise == pytest.approx(0.002)
    assert sum(phase.runs for phase in of) == len(results)
    lines = tunings(trials(results), [CLIP, EPS], complete=True)
    assert {key: lines[1000, key].state for key in (LR, CLIP, EPS)} == dict.fromkeys((LR, CLIP, EPS), "bracketed")


@pytest.mark.parametrize("draw", range(6))
def test_keys_without_an_effect_cost_little_and_change_nothing(draw: int) -> None:
    """Caught: the luck of one seed that counts as a gain; an arm that is untuned because a value is better by less than
    the noise; a lucky value that is compared at a rate which was not tuned for it."""
    noise = fixed_noise(0.01, draw)
    results, found = run(descent(), lambda x, point: 3 + 0.1 * x[LR] ** 2 + noise(point))
    moved = [phase for phase in found["gpt", 1000] if phase.key != LR and phase.state == GAINED]
    assert len(moved) <= 1
    assert all(phase.gain is not None and phase.noise is not None and phase.gain > phase.noise for phase in moved)
    if not moved:
        assert best_of(results)[CLIP] == best_of(results)[EPS] == 1.0
        assert len(results) <= 8 + 2 * (2 + 2)
        state = tunings(trials(results), [CLIP, EPS], complete=True)
        assert {state[1000, key].state for key in (LR, CLIP, EPS)} == {"bracketed"}


@pytest.mark.parametrize("case", ["together", "less than the noise", "diverges", "out of runs"])
def test_keys_that_gain_only_together(case: str) -> None:
    """Caught: values that stay because each alone gains less than the noise; a value taken along that only the seed
    which chose it found better; a rate that is not tuned after that; a gain of all that is not more than the noise, or
    with a seed that diverges, where the descent went round without end; runs beyond the budget."""
    luck = "optim.z_loss"
    worth = 0.012 if case == "less than the noise" else 0.018

    def loss(x: dict[str, float], point: Point) -> float | None:
        steps = [min(1.0, max(-1.0, -x[key])) for key in (CLIP, EPS, luck)]
        if case == "diverges" and steps[:2] == [1, 1] and point.seed == 0:
            return None
        of_luck = 0.01 * steps[2] * (-1 if point.seed == 0 else 1)
        return 3 + 0.1 * (x[LR] - 0.3 * min(steps[:2])) ** 2 - worth * sum(steps[:2]) + of_luck + 0.02 * point.seed

    of = descent(tune=dict.fromkeys((LR, CLIP, EPS, luck), 2.0))
    limit = sum(phase.runs for phase in run(of, loss)[1]["gpt", 1000][:4])
    results, found = run(replace(of, descent_runs=limit if case == "out of runs" else None), loss)
    together = next(phase for phase in found["gpt", 1000] if phase.key == f"{CLIP}, {EPS}")
    has_gained = case == "together"
    assert together.start == [1.0, 1.0]
    assert [best_of(results)[key] for key in (CLIP, EPS, luck)] == ([0.5, 0.5, 1.0] if has_gained else [1.0, 1.0, 1.0])
    assert together.state == (GAINED if has_gained else OUT_OF_RUNS if case == "out of runs" else WITHIN_NOISE)
    assert together.runs == (0 if case == "out of runs" else 3)
    after = found["gpt", 1000][found["gpt", 1000].index(together) + 1 :]
    assert [phase.key for phase in after[:1]] == ([LR] if has_gained else [])


@pytest.mark.parametrize("case", ["rate up", "rate down", "luck", "names", "out of runs"])
def test_a_value_that_gains_only_at_another_rate(case: str) -> None:
    """Caught: a valley across which neither the key nor the rate gains alone, on either of its sides; a valley that is
    left after one step; a corner that only the seed which chose it found better; one of a key without such a valley; a
    key without an order; runs beyond the budget."""
    names = ((0.9, 0.95), (0.9, 0.99), (0.5, 0.95))
    of = descent(tune={LR: 2.0, CLIP: names if case == "names" else 2.0, EPS: 2.0})
    side = -1 if case == "rate down" else 1

    def loss(x: dict[str, float], point: Point) -> float:
        value = x[CLIP] if CLIP in x else float(names.index(dict(point.values)[CLIP]) == 2)  # type: ignore[arg-type]
        worth = 0.02 * (value - 2) ** 2
        if case == "luck":
            value, worth = value * (point.seed == 0), worth if point.seed == 0 else 0.08 + 0.1 * value**2
        return 3 + 0.1 * (x[LR] - side * value) ** 2 + worth + 0.05 * x[EPS] ** 2 + 0.001 * point.seed

    limit = sum(phase.runs for phase in run(of, loss)[1]["gpt", 1000][:3]) if case == "out of runs" else None
    results, found = run(replace(of, descent_runs=limit), loss)
    first = next(phase for phase in found["gpt", 1000] if phase.key.endswith(f", {LR}"))
    has_gained = case not in ("luck", "out of runs")
    assert first.state == (GAINED if has_gained else OUT_OF_RUNS if case == "out of runs" else WITHIN_NOISE)
    at = {"names": (names[2], 2 * START), "rate down": (4.0, START / 4), "rate up": (4.0, 4 * START)}
    best = best_of(results)
    assert (best[CLIP], best[LR]) == at.get(case, (1.0, START))
    if has_gained:
        assert first.key == f"{CLIP}, {LR}"
        assert first.start == [names[0] if case == "names" else 1.0, START]
        assert first.end == [names[2] if case == "names" else 2.0, START * 2.0**side]
        assert first.n_seeds == 2, "the first seed chose it"
    assert EPS not in first.key, "no valley could gain there"


def test_failures_and_edges() -> None:
    """Caught: a descent that never ends where a key's best is beyond its values; values that diverge or run out of
    memory, and are taken; a start that fails."""

    def slope(x: dict[str, float], point: Point) -> float | None:
        return None if x[CLIP] < -1 else 3 + 0.1 * x[LR] ** 2 + 0.05 * x[CLIP] - 0.05 * x[EPS] + 0.001 * point.seed

    results, found = run(descent(), slope)
    assert best_of(results) == {LR: START, CLIP: 0.5, EPS: 8.0}
    state = tunings(trials(results), [CLIP, EPS], complete=True)
    assert (state[1000, CLIP].state, state[1000, EPS].state) == ("bracketed", "edge")
    assert found["gpt", 1000][1].gain == pytest.approx(0.05)
    results, found = run(descent(), lambda x, point: None if point.seed == 1 and x[CLIP] == 1 else slope(x, point))
    assert best_of(results)[CLIP] < 1 or not found["gpt", 1000]
    results, found = run(descent(), lambda x, point: None)
    assert found == {("gpt", 1000): []}


@pytest.mark.parametrize("limit", [1, 9, 12, 30])
def test_the_budget_of_runs(limit: int) -> None:
    """Caught: a key that is tried beyond the budget; a rate that stays untuned because of it."""

    def loss(x: dict[str, float], point: Point) -> float:
        return 3 + 0.1 * (x[LR] - 0.5 * x[CLIP]) ** 2 + 0.05 * (x[CLIP] + 3) ** 2 + 0.05 * (x[EPS] - 3) ** 2

    results, found = run(descent(descent_runs=limit), loss)
    made = 0
    for phase in found["gpt", 1000]:
        made += phase.runs
        assert phase.key == LR or made <= max(limit, found["gpt", 1000][0].runs)
    assert OUT_OF_RUNS in {phase.state for phase in found["gpt", 1000]}
    assert tunings(trials(results), complete=True)[1000, LR].state == "bracketed"


def test_lists_arms_of_their_own_and_the_budget_of_the_descent() -> None:
    """Caught: a key that an arm is not tuned for in its runs; keys that are tuned at each budget; values that are not
    taken over; a list whose values are tried as if they had an order."""
    tune = {LR: 2.0, "optim.betas": ((0.9, 0.95), (0.9, 0.99), (0.8, 0.95)), "ngpt": {CLIP: 2.0}}
    of = descent(arms={"gpt": (), "ngpt": ()}, budgets=(1000, 2000, 4000), descent_budget=2000, tune=tune)

    def loss(x: dict[str, float], point: Point) -> float:
        betas = {(0.9, 0.95): 0.0, (0.9, 0.99): 0.1, (0.8, 0.95): -0.1}[dict(point.values)["optim.betas"]]  # type: ignore[index]
        return 3 + 0.1 * x[LR] ** 2 + betas + 0.05 * (x.get(CLIP, 0) - 1) ** 2 + 0.001 * point.seed

    results, found = run(of, loss)
    assert {arm: best_of({p: r for p, r in results.items() if p.arm == arm}, 4000) for arm in of.arms} == {
        "gpt": {LR: START, "optim.betas": (0.8, 0.95)},
        "ngpt": {LR: START, "optim.betas": (0.8, 0.95), CLIP: 2.0},
    }
    assert {point.values for point in results if point.budget != 2000} == {
        point.values for point in results if point.budget != 2000 and dict(point.values)["optim.betas"] == (0.8, 0.95)
    }
    assert set(found) == {("gpt", 2000), ("ngpt", 2000)}
    betas = "optim.betas"
    assert [phase.key for phase in found["gpt", 2000]] == [LR, betas, LR, betas, f"{betas}, {LR}"]


@pytest.mark.parametrize("number", range(12))
def test_the_descent_is_a_function_of_the_losses_alone(number: int) -> None:
    """Caught: points that depend on the order in which runs end, so that a killed and resumed study goes another way;
    endless descents on surfaces of any form."""
    rng = random.Random(number)
    noise = fixed_noise(rng.choice([0.0, 0.003, 0.05]), number)
    at, tilt, limit = [rng.uniform(-2, 2) for _ in range(3)], rng.uniform(-1, 1), rng.choice([math.inf, 1.5])

    def loss(x: dict[str, float], point: Point) -> float | None:
        if x[LR] + x[CLIP] > limit:
            return None
        square = (x[LR] - at[0] - tilt * x[CLIP]) ** 2 + (x[CLIP] - at[1]) ** 2 + 0.5 * (x[EPS] - at[2] * tilt) ** 2
        return 3 + 0.05 * square + noise(point)

    of = descent(seeds=rng.choice([(0,), (0, 1, 2)]), budgets=rng.choice([(1000,), (1000, 2000)]))
    of = replace(of, descent_runs=rng.choice([None, 15]), max_points=rng.choice([3, 9]))
    results, found = run(of, loss)
    shuffled = run(of, loss, rng)
    assert (results, found) == shuffled
    for budget in of.budgets:
        if best := best_values(trials(results)[budget], complete=True):
            assert len(trials(results)[budget][best]) == len(of.seeds)
    assert all(known.state == DONE or known.loss is None for known in results.values())


@pytest.mark.parametrize("end", [None, 2.0, [2.0], [2.0, 1.0, 1.0]])
def test_a_damaged_phase_is_named(tmp_path: Path, end: object) -> None:
    """Caught: a traceback, or an arm that is compared at other values, by a phase of two keys without their values."""
    phase = Phase(f"{CLIP}, {EPS}", [1.0, 1.0], [2.0, 1.0], 0.1, 0.01, 3, 3, GAINED)
    write_phases(tmp_path, {("gpt", 1000): [phase]})
    assert ends_of(read_phases(tmp_path)) == {1000: {CLIP: 2.0, EPS: 1.0}}
    write_phases(tmp_path, {("gpt", 1000): [replace(phase, end=end)]})
    with pytest.raises(DataError, match=r"descent.json\[0\]: end has no value for each of"):
        read_phases(tmp_path)


OF_A_STUDY = """
tune: {schedule.warmup_steps: 2, optim.betas: [[0.9, 0.95], [0.9, 0.99]], ngpt: {model.s_z.scale: 2}}
descent_budget: 5120
descent_runs: 60
"""


def planted(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
    """A warm-up of half the start's and another beta2 are better, and s_z's scale does nothing."""
    x: dict[str, Any] = dict(point.values)
    at_start = dict(runs.first_point(point.arm, point.budget).values)
    loss = 3 + 0.1 * math.log2(x[LR] / at_start[LR]) ** 2 - 0.2 * (x["optim.betas"] == (0.9, 0.99))
    loss += 0.1 * math.log2(2 * x["schedule.warmup_steps"] / 2) ** 2 - 0.1 * (point.arm == "ngpt")
    leave(runs, point, {}, loss + 0.01 * point.seed + 1e3 / point.budget)
    return 0, ""


def test_from_the_definition_to_the_report(tmp_path: Path) -> None:
    """Caught: values that the configuration refuses, such as a warm-up as long as the run; a list, or an integer, that
    is not found again at the next start; a definition that is not read as it was written; a report without what each
    key gained, or without the keys that one arm alone was tuned for; an option of one arm that counts as a confound."""
    of = study_of(tmp_path, text=YAML.replace("{scale", "{schedule.warmup_steps: 2, scale") + OF_A_STUDY)
    runs = Runs(of)
    runs.check()
    assert runs.grids("gpt", 5120)["schedule.warmup_steps"] == Grid((2, 1, 4, 8), outward=True)
    assert list(runs.grids("ngpt", 5120)) == ["schedule.warmup_steps", "optim.betas", "model.s_z.scale"]
    phases_said = cost_of_phases(of, runs, rehearsal(of, runs))
    assert "  ngpt: optim.lr " in phases_said
    assert "the verdict at 25.6k is `untuned`" in phases_said
    write_study(of)
    assert read_stored(of.path) == of
    results: dict[Point, Result] = {}

    def until_killed(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        if len(results) == 25:
            raise KeyboardInterrupt  # nothing is written after it, as after a SIGKILL
        ended = planted(runs, point, attempt)
        results[point] = runs.result(point)
        return ended

    with pytest.raises(KeyboardInterrupt):
        Runner(of, runs, FakeEngine(runs, until_killed), Heard(), 0).complete()  # type: ignore[arg-type]
    by_then = read_phases(of.path)
    assert len(by_then) > 2
    write_phases(of.path, phases(of, runs.start, runs.grids, results))
    assert read_phases(of.path) == by_then
    for _ in range(2):  # the second start finds all runs
        engine = FakeEngine(runs, planted, jobs=8)
        runner = Runner(of, runs, engine, Heard(), 0)  # type: ignore[arg-type]
        assert runner.complete()
    assert not engine.started
    carried = {dict(point.values)["schedule.warmup_steps"] for point in runner.results if point.budget == 25600}
    assert carried == {5}  # the share of the run that 1 of 10 steps is
    check_stored(of, runs)
    more, other_first = "[0.9, 0.95], [0.7, 0.95], [0.9, 0.99]", "[0.9, 0.99], [0.9, 0.95]"
    for old, new, taken in (
        ("[0.9, 0.95], [0.9, 0.99]", more, True),
        ("ngpt: {model.s_z", "new: {optim.eps: 2}, ngpt: {model.s_z", True),
        ("[0.9, 0.95], [0.9, 0.99]", other_first, False),
        ("[0.9, 0.95], [0.9, 0.99]", "[0.9, 0.95], [0.8, 0.95]", False),
        ("ngpt: {model.s_z", "ngpt: {optim.eps: 2, model.s_z", False),
    ):
        text = YAML.replace("{scale", "{schedule.warmup_steps: 2, scale") + OF_A_STUDY.replace(old, new)
        other = study_of(tmp_path, text=text.replace("  ngpt", "  new: {model: gpt}\n  ngpt"))
        with nullcontext() if taken else pytest.raises(ConfigError, match=r"study\.tune"):
            check_stored(other, Runs(other))

    given = gather([of.path])
    found, tuned, _ = choose_arms(given)
    report = make_report(given, found, tuned, {}, [])
    gained = [(x["arm"], x["key"], x["end"], round(x["gain"], 6)) for x in report["descent"] if x["state"] == GAINED]
    assert gained == [
        (arm, *of_key)
        for arm in ("gpt", "ngpt")
        for of_key in (("schedule.warmup_steps", 1, 0.1), ("optim.betas", [0.9, 0.99], 0.2))
    ]
    assert (report["arms"]["gpt"]["state"], report["verdicts"]["ngpt"]) == ("elsewhere", "untuned")
    assert report["tuning_of_keys"]["ngpt"]["tuned_elsewhere"] == {
        "schedule.warmup_steps": 5120,
        "optim.betas": 5120,
        "model.s_z.scale": 5120,
    }
    confounds = {entry["key"] for entry in report["referee"] if entry["kind"] == "confound"}
    assert not confounds & {"model.s_z.scale", "schedule.warmup_steps", "optim.betas"}
    for text in (document(report, {}), html(report)):
        assert "What each key gained" in text
        assert "not tried" not in text
        said = "both tuned for optim.lr, optim.betas, schedule.warmup_steps; ngpt alone for model.s_z.scale."
        assert f"ngpt and gpt were {said}" in text.replace("\\", "")
    untried = {"key": "optim.betas", "start": [0.9, 0.99], "end": None, "state": OUT_OF_RUNS}
    given.descent.append({"arm": "gpt", "budget": 25600, **untried})
    states = {name: arm["state"] for name, arm in make_report(given, found, tuned, {}, [])["arms"].items()}
    assert states == {"gpt": "edge", "ngpt": "elsewhere"}, "no run was left to try a key"
