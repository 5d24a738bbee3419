"""The steps of test_communication.py on this rank, under torchrun: OUT PARALLEL."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.communication import Collectives
from ngpt_train.optim.row_adam import RowAdam, local_rows
from ngpt_train.training import TrainState, build_state, train_step
from ngpt_train.training.step import update_weights_
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

CONTEXT = 16
RECIPE = Recipe(12, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)
EXCHANGES = {  # parallel.gather, parallel.scatter
    "as it is": [],
    "gather micro_batch": ["parallel.gather=micro_batch"],
    "scatter step": ["parallel.scatter=step"],
    "gather step, scatter step": ["parallel.gather=step", "parallel.scatter=step"],
}


def state_of(name: str, parallel: str, *options: str) -> TrainState:
    options = (*options, *(["parallel.shard=2"] if parallel == "hsdp" else []))
    # With a batch of any size: train_step takes what it is given.
    return build_state(
        run_config(name, SMALL, RECIPE, rows=4, context=CONTEXT, micro_rows=1, parallel=parallel, options=options)
    )


def take_step(state: TrainState, n_micro_batches: int) -> float:
    """The loss of the same 8 rows for any number of ranks and micro batches."""
    rank, size = state.world.rank, state.world.size
    batch = text_like_rows(8, CONTEXT, SMALL.vocab_size, seed=state.step)
    mine = [part.chunk(size)[rank].chunk(n_micro_batches) for part in batch]
    return train_step(state, list(zip(*mine, strict=True))).loss.item()


def of_the_update(name: str, parallel: str, kernels: str) -> dict[str, Any]:
    """Collectives of the optimizer's step and the projection, after gradients that push rows off the sphere."""
    state = state_of(name, parallel, f"kernels.kind={kernels}")
    assert isinstance(state.optimizer, RowAdam) == (kernels == "triton")
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    counter = Collectives()
    with counter:
        update_weights_(state, torch.tensor(1.0), torch.tensor(False), lr=0.5)
    matrices = [parameter.detach() for parameter in state.model.parameters() if parameter.ndim == 2]
    rows = torch.cat([local_rows(matrix).norm(dim=1) for matrix in matrices])
    return {"collectives": len(counter.found), "off_sphere": (rows - 1).abs().max().item()}


def of_whole_steps(parallel: str, options: list[str], n_micro_batches: int) -> dict[str, Any]:
    """Three steps; collectives of the third, so that those before have changed between one micro batch and more."""
    state = state_of("ngpt", parallel, *options)
    losses = [take_step(state, 1), take_step(state, n_micro_batches)]
    counter = Collectives()
    with counter:
        losses.append(take_step(state, n_micro_batches))
    calls = {f"{x.kind} of {x.ranks}": [x.calls, x.bytes] for x in counter.by_kind()}
    matrices = [parameter for parameter in state.model.parameters() if parameter.ndim == 2]
    shards = min(2, state.world.size)  # FSDP2 fills the last one up
    of_matrices = sum(4 * -(-len(matrix) // shards) * shards * matrix.shape[1] for matrix in matrices)
    of_vectors = sum(4 * parameter.numel() for parameter in state.model.parameters() if parameter.ndim < 2)
    return {
        "calls": calls,
        "losses": losses,
        "blocks": len(state.model.blocks()),
        "of matrices": of_matrices,
        "of vectors": of_vectors,
        "of parameters": 4 * state.model.n_params(),
    }


def main(out: str, parallel: str) -> None:
    report = {
        "update": {
            f"{name}, {kernels}": of_the_update(name, parallel, kernels)
            for name, kernels in (("ngpt", "torch"), ("ngpt", "triton"), ("ntransformer", "torch"))
        },
        "steps": {
            f"{exchange}, {n}": of_whole_steps(parallel, options, n)
            for exchange, options in EXCHANGES.items()
            if exchange == "as it is" or "sdp" in parallel
            for n in (1, 2)
        },
    }
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without the interpreter's farewell, as in equality_worker.py.
    os._exit(0)
