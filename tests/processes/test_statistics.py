"""Running statistics on two ranks: those of all rows together, or each rank's own, and what becomes of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.config.schema import Config
from ngpt_train.data.rows import Batch
from ngpt_train.evaluation import validation
from ngpt_train.evaluation.validation import Validation
from ngpt_train.models import build_model, export_weights, load_weights
from ngpt_train.training import build_state, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_model, load_state
from ngpt_train.training.state import TrainState
from tests.processes.launch import on_ranks
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe
from tests.stored import save_state

STEPS, WARMUP, ROWS, CONTEXT = 6, 3, 4, 16
RECIPE = Recipe(12, 3e-3, 0.9, 0.95, 1e-6, weight_decay=0.0, clip_norm=1.0, warmup_steps=WARMUP)
RUNS = {  # norm, activation checkpointing, compile
    "pn": ("pn", "none", False),
    "pn_v": ("pn_v", "none", False),
    "batch": ("batch", "none", False),
    "pn recomputed": ("pn", "full", False),
    "batch recomputed": ("batch", "full", False),
}
COMPILED = {
    "pn compiled": ("pn", "none", True),
    "pn_v compiled": ("pn_v", "none", True),
    "batch compiled, recomputed": ("batch", "full", True),
}


def config_of(run: str, parallel: str, kind: str, micro_rows: int) -> Config:
    norm, recomputed, compiled = (RUNS | COMPILED)[run]
    compiled = compiled and parallel != "single"  # what it is compared with is eager
    config = run_config(
        "powernorm", SMALL, RECIPE, rows=ROWS, context=CONTEXT, micro_rows=micro_rows, parallel=parallel
    )
    model = replace(config.model, norm=norm, statistics=kind, alpha_fwd=0.8, alpha_bkw=0.93)
    return replace(
        config, model=model, train=replace(config.train, activation_checkpointing=recomputed, compile=compiled)
    )


def batch(step: int) -> list[Tensor]:
    """tokens, targets and document ids of all rows; the last rows, those of rank 1, are padding for the most part."""
    tokens, targets = text_like_rows(ROWS, CONTEXT, SMALL.vocab_size, seed=step)
    doc_ids = (torch.arange(CONTEXT) > 4 + step).long().repeat(ROWS, 1)
    for row, end in ((1, 14), (2, 5), (3, 7)):
        doc_ids[row, end:], targets[row, end:] = -1, -100
    return [tokens, targets, doc_ids]


def one_run(state: TrainState, steps: range) -> list[dict[str, Any]]:
    """What each step leaves on this rank."""
    found = []
    for step in steps:
        before = export_weights(state.model)
        mine = [part.chunk(state.world.size)[state.world.rank] for part in batch(step)]
        result = train_step(state, [mine])
        parameters = {name: p.detach() for name, p in state.model.named_parameters()}
        found.append(
            {
                "before": before,
                "loss": result.loss.item(),
                "grad_norm": result.grad_norm.item(),
                "n_tokens": int(result.n_tokens),
                # Not through the framework: what this rank itself holds.
                "held": {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in parameters.items()},
                "statistics": statistics(state),
            }
        )
    return found


def statistics(state: TrainState) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.model.statistics().items()}


class Rows:
    """Five rows to validate on: three chunks for two ranks."""

    def __len__(self) -> int:
        return 5

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        ids = np.random.default_rng(0).integers(SMALL.vocab_size, size=(5, CONTEXT + 1))[indices]
        return ids[:, :-1], ids[:, 1:]


def validate(state: TrainState) -> float:
    check = Validation(Rows(), np.full(SMALL.vocab_size, 2), np.arange(5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "CHUNK_TOKENS", 2 * CONTEXT)
        return check.row_losses(state.model, state.world).metrics()["loss"]


def reported(directory: Path, config: Config) -> dict[str, Any]:
    """What this rank reports of a run."""
    state = build_state(config)
    report = {"steps": one_run(state, range(STEPS)), "validation": validate(state)}
    report["after validation"] = statistics(state)
    kept = save_state(Checkpoints(directory, state.world, keep_last=1, keep_every=None), state)
    again = build_state(config)
    load_state(kept, again)
    report |= {"checkpoint": str(kept), "restored": statistics(again)}
    report["went on"] = one_run(state, range(STEPS, STEPS + 1))
    report["resumed"] = one_run(again, range(STEPS, STEPS + 1))
    return report


def of_all(parallel: str, kinds: list[str], names: list[str], directory: str) -> dict[str, Any]:
    """What this rank reports, by kind of statistics and run; of synchronised ones the steps alone."""

    def told(kind: str, run: str) -> dict[str, Any]:
        config = config_of(run, parallel, kind, micro_rows=ROWS // 2)
        if kind == "synchronised":
            return {"steps": one_run(build_state(config), range(STEPS))}
        return reported(Path(directory) / kind / run, config)

    return {kind: {run: told(kind, run) for run in names} for kind in kinds}


runs = pytest.mark.parametrize("run", RUNS)
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """All runs of both kinds, in one launch of a layout."""
    directory = tmp_path_factory.mktemp(request.param)
    return on_ranks(of_all, 2, request.param, ["synchronised", "per_rank"], list(RUNS), str(directory))


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


def assert_one_process(ranks: Ranks, run: str, rel: float) -> None:
    """A synchronised run is that of one process: losses and norms within `rel`, statistics within ten times that."""
    expected = one_run(build_state(config_of(run, "single", "synchronised", micro_rows=ROWS)), range(STEPS))
    first, second = (rank[run]["steps"] for rank in ranks)
    for here, there, one in zip(first, second, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert here[key] == there[key] == pytest.approx(one[key], rel=rel)
        assert here["n_tokens"] == one["n_tokens"]
        assert_near(there["statistics"], here["statistics"], 0)
        assert_near(there["held"], here["held"], 0)
        assert_near(here["statistics"], one["statistics"], 10 * rel)


@runs
def test_synchronised_is_one_process(synchronised: Ranks, run: str) -> None:
    """Caught: a sum over ranks without its gradient, statistics of the rank's own rows."""
    assert_one_process(synchronised, run, 1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_and_synchronised_is_one_process(parallel: str, tmp_path: Path) -> None:
    """Caught: a collective that the compiled graph drops."""
    ranks = on_ranks(of_all, 2, parallel, ["synchronised"], list(COMPILED), str(tmp_path))
    for run in COMPILED:
        assert_one_process([rank["synchronised"] for rank in ranks], run, 1e-5)


@runs
def test_per_rank_is_of_the_ranks_own_rows(per_rank: Ranks, run: str) -> None:
    """Each step again in one process, from the ranks' weights and on one rank's rows. Caught: synchronised ones."""
    for rank, report in enumerate(per_rank):
        model = build_model(config_of(run, "single", "per_rank", micro_rows=ROWS).model)
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
    state = build_state(config_of(run, "single", "per_rank", micro_rows=ROWS))
    load_state(Path(first["checkpoint"]), state)
    assert_near(state.model.statistics(), mean, 0)
    alone = build_model(state.config.model)
    load_model(Path(first["checkpoint"]), alone, state.world)
    assert_near(alone.statistics(), mean, 0)
    assert first["validation"] == second["validation"] == pytest.approx(validate(state), rel=1e-6)
    for report, end in zip((first, second), ends, strict=True):
        assert_near(report["after validation"], end, 0)
