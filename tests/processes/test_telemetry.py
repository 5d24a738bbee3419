"""Telemetry of runs: on two ranks, in the files of a run, across a restart."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ngpt_train.models import build_model, export_weights, load_weights
from ngpt_train.models.weights import export_gradients
from ngpt_train.observe.telemetry.collector import Telemetry
from ngpt_train.training import build_state, train_step
from ngpt_train.training.state import TrainState
from ngpt_train.training.step import MicroBatch
from tests.processes.launch import on_ranks
from tests.processes.runs import arguments, forked, numbers, records, train
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference import telemetry as reference
from tests.reference.training import Recipe

NAMES = ["ngpt", "normformer", "powernorm"]
ROWS, CONTEXT, STEPS = 8, 16, 2
RECIPE = Recipe(12, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.05, warmup_steps=0)


class Witness(Telemetry):
    """Telemetry that also keeps what it was shown, whole."""

    def before_step(self, state: TrainState, micro_batches: Sequence[MicroBatch]) -> None:
        self.weights = export_weights(state.model)
        self.statistics = {name: value.clone() for name, value in state.model.statistics().items()}
        self.row = [part[:1] for part in micro_batches[0]]
        super().before_step(state, micro_batches)

    def before_update(self, state: TrainState) -> None:
        self.gradients = export_gradients(state.model)
        super().before_update(state)


def alone(state: TrainState, witness: Witness) -> dict[str, list[float]]:
    """The attention of this rank's row, by a telemetry of one process whose model has the same weights."""
    model = build_model(state.config.model)
    load_weights(model, witness.weights)
    for name, value in model.statistics().items():
        value.copy_(witness.statistics[name])
    config = replace(state.config, parallel=replace(state.config.parallel, kind="single"))
    one = copy.copy(state)
    one.model, one.config = model, config
    one.world = replace(state.world, rank=0, size=1)
    telemetry = Telemetry(one)
    telemetry.before_step(one, [witness.row])
    scores = telemetry._scores
    numbers = scores.after_update()
    return {
        place: [float(numbers.largest[i]), *numbers.summed[2 * i : 2 * i + 2].tolist()]
        for i, place in enumerate(scores._found)
    }


def batch(step: int) -> tuple[Tensor, Tensor]:
    return text_like_rows(ROWS, CONTEXT, SMALL.vocab_size, seed=step)


def one_run(name: str, parallel: str) -> dict[str, Any]:
    options = ["model.statistics=per_rank", "model.psi_warmup_steps=1"] if name == "powernorm" else []
    config = run_config(
        name, SMALL, RECIPE, rows=ROWS, context=CONTEXT, micro_rows=2, parallel=parallel, options=options
    )
    if parallel == "hsdp":
        config = replace(config, parallel=replace(config.parallel, shard=2))
    state = build_state(config)
    witness = Witness(state)
    for step in range(STEPS):
        mine = [part.chunk(state.world.size)[state.world.rank].split(2) for part in batch(step)]
        train_step(state, list(zip(*mine, strict=True)), observer=witness)
    records = witness.records()
    after = export_weights(state.model)
    return {
        "records": records,
        "changes": reference.changes(witness.weights, after, witness.gradients),
        "scores": alone(state, witness),
        "nu": {n: float(x.double().norm()) for n, x in state.model.statistics().items() if n.endswith(".nu")},
    }


def all_runs(parallel: str) -> dict[str, Any]:
    return {name: one_run(name, parallel) for name in NAMES}


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return all_runs("single")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("parallel", "n_ranks"), [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)]
)
def test_on_several_ranks(single: dict[str, Any], parallel: str, n_ranks: int) -> None:
    """By brute force on whole weights, and beside one process. Caught: rows of another rank's part of a fused matrix,
    whole vectors that all ranks add, shards that each group adds, a mean of means, the rows of rank 0 alone."""
    ranks = on_ranks(all_runs, n_ranks, parallel)
    for name in NAMES:
        here, *others = (rank[name] for rank in ranks)
        assert all(str(here["records"]) == str(other["records"]) for other in others), "nan included"
        record = here["records"][-1]
        assert [each["step"] for each in here["records"]] == [1, STEPS]
        for key, value in here["changes"].items():
            assert record[key] == pytest.approx(value, rel=4 * 2**-23, nan_ok=True), key
        for place in here["scores"]:
            largest, saturated, rows = zip(*(rank[name]["scores"][place] for rank in ranks), strict=True)
            assert len(set(largest)) == n_ranks
            assert record[f"attention_max_logit/{place}"] == pytest.approx(max(largest), rel=1e-4)
            share = sum(saturated) / sum(rows)
            assert record[f"attention_saturated/{place}"] == pytest.approx(share, abs=2 / rows[0])
        for place in here["nu"]:
            nu = [rank[name]["nu"][place] for rank in ranks]
            assert len(set(nu)) == n_ranks
            assert record[f"nu_l2/{place.removesuffix('.nu')}"] == pytest.approx(sum(nu) / n_ranks, rel=1e-6)
        if name != "powernorm":  # whose statistics, and so its gradients, are those of a rank's own rows
            first, expected = here["records"][0], single[name]["records"][0]
            assert first.keys() == expected.keys()
            for key in [key for key in expected if key.startswith(("grad", "weight", "value", "update", "angle"))]:
                # Adam divides a gradient by its size, so that an entry near 0 may move the other way.
                assert first[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-9, nan_ok=True), key


def test_in_the_files_of_a_run(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scheme of names; nothing in the console, the curves or other records. Caught: records before a checkpoint
    that are lost or come twice, telemetry that changes the run."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = ["logging.telemetry=2", "logging.every=5", "checkpoint.every=4", "logging.tensorboard=true"]
    whole, parts, plain = (tmp_path / name for name in ("whole", "parts", "plain"))
    with monkeypatch.context() as drawn:
        drawn.setenv("NGPT_TESTS_CURVES", "1")
        finished = forked("train", arguments(whole, corpus, *options))
    assert finished.returncode == 0, finished.stderr
    train(arguments(parts, corpus, *options, "train.stop_at=7"))
    # As after a kill at step 7: the checkpoint of step 4 is the last one.
    newest = parts / "runs/test/checkpoints/step_00000007"
    newest.rename(parts / "gone")
    train(arguments(parts, corpus, *options))
    train(arguments(plain, corpus, "logging.every=5", "checkpoint.every=4"))

    found, resumed = (records(directory / "runs/test", "telemetry") for directory in (whole, parts))
    assert list(found) == [2, 4, 6, 8, 10, 12]
    trained = [record.pop("train_seconds") for record in found.values()]
    assert trained == sorted(trained)
    assert all(record.pop("train_seconds") for record in resumed.values())
    assert resumed == found
    assert found[12]["flops"] == records(whole / "runs/test", "eval")[12]["flops"]
    assert numbers(whole / "runs/test") == numbers(plain / "runs/test")
    assert "update_ratio/layers.0.wq" in found[2]
    assert "update_ratio" not in finished.stdout
    assert "telemetry" not in (whole / "runs/test/logs/rank_0.log").read_text()
    assert (whole / "runs/test/curves.png").exists()
    events = accumulator.EventAccumulator(str(whole / "runs/test/tensorboard")).Reload()
    scalars = events.Scalars("telemetry/update_ratio/layers.0.wq")
    assert [event.step for event in scalars] == list(found)
    assert scalars[0].value == pytest.approx(found[2]["update_ratio/layers.0.wq"])
