"""Runs of test_statistics.py on this rank, under torchrun: OUT PARALLEL STATISTICS,... RUN..."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.config.schema import Config
from ngpt_train.data import Batch
from ngpt_train.evaluation import validation
from ngpt_train.evaluation.validation import Validation
from ngpt_train.models import export_weights
from ngpt_train.training import build_state, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.state import TrainState
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

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


def worker_config(run: str, parallel: str, kind: str, micro_rows: int) -> Config:
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
    validation.CHUNK_TOKENS = 2 * CONTEXT
    check = Validation(Rows(), np.full(SMALL.vocab_size, 2), np.arange(5))
    return check.row_losses(state.model, state.world).metrics()["loss"]


def reported(directory: Path, config: Config) -> dict[str, Any]:
    """What this rank reports of a run."""
    state = build_state(config)
    report = {"steps": one_run(state, range(STEPS)), "validation": validate(state)}
    report["after validation"] = statistics(state)
    kept = Checkpoints(directory, state.world, keep_last=1, keep_every=None).save(state, {}, lambda path: None)
    again = build_state(config)
    load_state(kept, again)
    report |= {"checkpoint": str(kept), "restored": statistics(again)}
    report["went on"] = one_run(state, range(STEPS, STEPS + 1))
    report["resumed"] = one_run(again, range(STEPS, STEPS + 1))
    return report


def main(out: str, parallel: str, kinds: str, *runs: str) -> None:
    report = {
        kind: {
            run: reported(Path(out).parent / kind / run, worker_config(run, parallel, kind, micro_rows=ROWS // 2))
            for run in runs
        }
        for kind in kinds.split(",")
    }
    torch.save(report, f"{out}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without the interpreter's farewell, as in equality_worker.py.
    os._exit(0)
