"""Running statistics on two ranks: those of all rows together, or each rank's own, and what becomes of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.models import build_model, load_weights
from ngpt_train.training import build_state
from ngpt_train.training.checkpoint import load_model, load_state
from tests.processes.launch import launch
from tests.processes.statistics_worker import COMPILED, ROWS, RUNS, STEPS, batch, one_run, validate, worker_config

runs = pytest.mark.parametrize("run", RUNS)
Ranks = list[dict[str, Any]]


def run_ranks(out: Path, parallel: str, kinds: str, runs: Iterable[str] = RUNS) -> Ranks:
    """What each of two ranks reports, by kind of statistics and run."""
    return [torch.load(report) for report in launch("statistics_worker.py", out, 2, parallel, kinds, *runs)]


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """All runs of both kinds, in one launch of a layout."""
    return run_ranks(tmp_path_factory.mktemp(request.param) / "out", request.param, "synchronised,per_rank")


@pytest.fixture
def synchronised(both: Ranks) -> Ranks:
    return [report["synchronised"] for report in both]


@pytest.fixture
def per_rank(both: Ranks) -> Ranks:
    return [report["per_rank"] for report in both]


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Each tensor to `rtol` of its largest entry; 0: bit for bit."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert (actual[name] - x).abs().max() <= rtol * x.abs().max(), name


@runs
def test_synchronised_is_one_process(synchronised: Ranks, run: str) -> None:
    """Caught: a sum over ranks without its gradient, statistics of the rank's own rows."""
    expected = one_run(build_state(worker_config(run, "single", "synchronised", micro_rows=ROWS)), range(STEPS))
    first, second = (rank[run]["steps"] for rank in synchronised)
    for here, there, one in zip(first, second, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert here[key] == there[key] == pytest.approx(one[key], rel=1e-6)
        assert here["n_tokens"] == one["n_tokens"]
        assert_near(there["statistics"], here["statistics"], 0)
        assert_near(there["held"], here["held"], 0)
        assert_near(here["statistics"], one["statistics"], 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_and_synchronised_is_one_process(parallel: str, tmp_path: Path) -> None:
    """Caught: a collective that the compiled graph drops."""
    ranks = run_ranks(tmp_path / "out", parallel, "synchronised", COMPILED)
    for run in COMPILED:
        expected = one_run(build_state(worker_config(run, "single", "synchronised", micro_rows=ROWS)), range(STEPS))
        first, second = (rank["synchronised"][run]["steps"] for rank in ranks)
        for here, there, one in zip(first, second, expected, strict=True):
            for key in ("loss", "grad_norm"):
                assert here[key] == there[key] == pytest.approx(one[key], rel=1e-5)
            assert_near(there["held"], here["held"], 0)
            assert_near(here["statistics"], one["statistics"], 1e-4)


@runs
def test_per_rank_is_of_the_ranks_own_rows(per_rank: Ranks, run: str) -> None:
    """Each step again in one process, from the ranks' weights and on one rank's rows. Caught: synchronised ones."""
    for rank, report in enumerate(per_rank):
        model = build_model(worker_config(run, "single", "per_rank", micro_rows=ROWS).model)
        for step, found in enumerate(report[run]["steps"]):
            load_weights(model, found["before"])
            share = torch.tensor(2 / found["n_tokens"])
            model.begin_step_(step, share)
            loss, _ = model.loss(*(part.chunk(2)[rank] for part in batch(step)))
            (loss * share).backward()
            assert_near(found["statistics"], model.statistics(), 1e-5)
    for here, there in zip(*(report[run]["steps"] for report in per_rank), strict=True):
        assert_near(there["held"], here["held"], 0)
        for name, x in here["statistics"].items():
            assert name.endswith("n_warmup") or not torch.allclose(there["statistics"][name], x, rtol=1e-3, atol=0)


@runs
def test_a_resume_gives_each_rank_its_own(per_rank: Ranks, run: str) -> None:
    for report in per_rank:
        assert_near(report[run]["restored"], report[run]["steps"][-1]["statistics"], 0)
        (on,), (resumed,) = report[run]["went on"], report[run]["resumed"]
        assert resumed["loss"] == on["loss"]
        assert_near(resumed["statistics"], on["statistics"], 0)
        assert_near(resumed["held"], on["held"], 0)


@runs
def test_one_process_takes_the_mean(per_rank: Ranks, run: str) -> None:
    """Validation does so on every rank, and puts back what was there. Caught: rank 0's alone."""
    first, second = (report[run] for report in per_rank)
    ends = [report["steps"][-1]["statistics"] for report in (first, second)]
    mean = {name: (x + ends[1][name]) / 2 for name, x in ends[0].items()}
    state = build_state(worker_config(run, "single", "per_rank", micro_rows=ROWS))
    load_state(Path(first["checkpoint"]), state)
    assert_near(state.model.statistics(), mean, 0)
    alone = build_model(state.config.model)
    load_model(Path(first["checkpoint"]), alone, state.world)
    assert_near(alone.statistics(), mean, 0)
    assert first["validation"] == second["validation"] == pytest.approx(validate(state), rel=1e-6)
    for report, end in zip((first, second), ends, strict=True):
        assert_near(report["after validation"], end, 0)
