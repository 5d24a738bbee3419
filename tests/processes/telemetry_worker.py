"""Telemetry of a run of test_telemetry.py on this rank, under torchrun: OUT PARALLEL MODEL..."""

import copy
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.models import build_model, export_weights, load_weights
from ngpt_train.models.weights import export_gradients
from ngpt_train.observe.telemetry.collector import Telemetry
from ngpt_train.training import build_state, train_step
from ngpt_train.training.state import TrainState
from ngpt_train.training.step import MicroBatch
from tests.properties.architectures import ARCHITECTURES, SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference import telemetry as reference
from tests.reference.training import Recipe

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
    n = len(numbers.largest)
    return {
        place: [float(numbers.largest[i]), float(numbers.summed[i]), float(numbers.summed[n + i])]
        for i, place in enumerate(scores._largest)
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
    sphere = ARCHITECTURES[name].on_sphere
    after = export_weights(state.model)
    return {
        "records": records,
        "changes": reference.changes(witness.weights, after, witness.gradients, sphere),
        "scores": alone(state, witness),
        "nu": {n: float(x.double().norm()) for n, x in state.model.statistics().items() if n.endswith(".nu")},
    }


def main(out: str, parallel: str, *names: str) -> None:
    report = {name: one_run(name, parallel) for name in names}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(f"{out}.{rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without the interpreter's farewell, as in equality_worker.py.
    os._exit(0)
