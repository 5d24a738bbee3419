"""fp16 on two ranks: one loss scale, one decision, and the run of one process."""

from typing import Any

import pytest
import torch

from ngpt_train.models import export_weights
from ngpt_train.training import build_state, train_step
from tests.processes.launch import on_ranks
from tests.processes.test_equality import digest
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

STEPS, BAD, ROWS, CONTEXT = 8, 3, 4, 32
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.2, warmup_steps=0)


def one_run(parallel: str) -> list[dict[str, Any]]:
    """The steps of this rank. The gradients of the last rank overflow in step BAD."""
    config = run_config(
        "ngpt", SMALL, RECIPE, rows=ROWS, context=CONTEXT, micro_rows=2, parallel=parallel,
        options=["train.precision=fp16"],
    )  # fmt: skip
    state = build_state(config)
    rank, size = state.world.rank, state.world.size
    vector = next(p for p in state.model.parameters() if p.ndim == 1)
    overflows = False
    vector.register_hook(lambda gradient: gradient * torch.inf if overflows else gradient)
    report = []
    for step in range(STEPS):
        overflows = step == BAD and rank == size - 1
        mine = [part.chunk(size)[rank].split(2) for part in text_like_rows(ROWS, CONTEXT, SMALL.vocab_size, seed=step)]
        result = train_step(state, list(zip(*mine, strict=True)))
        assert result.loss_scale is not None
        report.append(
            {
                "loss": result.loss.item(),
                "grad_norm": result.grad_norm.item(),
                "skipped": bool(result.skipped),
                "loss_scale": result.loss_scale.item(),
                "weights": digest(export_weights(state.model)),
            }
        )
    return report


@pytest.fixture(scope="module")
def single() -> list[dict[str, Any]]:
    return one_run("single")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_agree_on_an_overflow(single: list[dict[str, Any]], parallel: str) -> None:
    """Losses as on one process to fp16's rounding. Caught: a rank that skips a step alone, or scales its loss with a
    scale of its own; gradients that are scaled once for each rank."""
    first, second = on_ranks(one_run, 2, parallel)
    assert first == [pytest.approx(there, nan_ok=True) for there in second]
    assert [step["skipped"] for step in first] == [step == BAD for step in range(STEPS)]
    assert [step["loss_scale"] for step in first] == [2.0**16 if step <= BAD else 2.0**15 for step in range(STEPS)]
    assert first[BAD]["weights"] == first[BAD - 1]["weights"] != first[BAD + 1]["weights"]
    for here, one in zip(first, single, strict=True):
        assert here["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert here["skipped"] or here["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)
    assert first[-1]["loss"] < 0.98 * first[0]["loss"]
