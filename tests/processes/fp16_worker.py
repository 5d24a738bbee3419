"""The run of test_fp16.py on this rank: OUT PARALLEL. The gradients of the last rank overflow in step BAD."""

import json
import os
import sys
from pathlib import Path

import torch

from ngpt_train.models import export_weights
from ngpt_train.training import build_state, train_step
from tests.processes.equality_worker import digest
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

STEPS, BAD, ROWS, CONTEXT = 8, 3, 4, 32
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.2, warmup_steps=0)


def main(out: str, parallel: str) -> None:
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
    Path(f"{out}.{rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without the interpreter's farewell, as in equality_worker.py.
    os._exit(0)
