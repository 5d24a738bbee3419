"""One layout of the run in tests/unit/test_encoder_decoder.py, under torchrun: OUT MODEL PARALLEL ACCUMULATION."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ngpt_train.models import export_weights
from ngpt_train.training import build_state, train_step
from tests.distributed.equality_worker import digest
from tests.properties.runs import run_config
from tests.unit.test_encoder_decoder import RECIPES, RUN_CONTEXT, RUN_SIZE, padded_rows

ROWS = 8


def main(out: str, name: str, parallel: str, accumulation: int) -> None:
    config = run_config(name, RUN_SIZE, RECIPES[name], rows=ROWS, context=RUN_CONTEXT, micro_rows=1, parallel=parallel)
    state = build_state(config)
    rank, size = state.world.rank, state.world.size
    initial = export_weights(state.model)
    losses, norms, tokens = [], [], []
    for step in range(config.train.steps):
        # Rank r takes its share of the same rows; the last rows count far fewer targets than the first.
        mine = [part.chunk(size)[rank].chunk(accumulation) for part in padded_rows(ROWS, seed=step)]
        result = train_step(state, list(zip(*mine, strict=True)))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
        tokens.append(int(result.n_tokens))
    final = export_weights(state.model)
    # Not through the framework: what this rank itself holds.
    parameters = {key: p.detach() for key, p in state.model.named_parameters()}
    held = digest({key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in parameters.items()})
    summary = {
        "initial": digest(initial),
        "held": held,
        "losses": losses,
        "norms": norms,
        "tokens": tokens,
        "unmoved": [key for key, x in final.items() if torch.equal(x, initial[key])],
        "off_sphere": max((x.norm(dim=-1) - 1).abs().max().item() for x in final.values() if x.ndim == 2),
        "sharded": any(isinstance(p, DTensor) for p in parameters.values()),
    }
    Path(f"{out}.{rank}").write_text(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    # As in equality_worker.py: gloo's threads may still hold tensors when the process group is taken down.
    os._exit(0)
