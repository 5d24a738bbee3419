"""Runs of test_equality.py on these ranks, under torchrun: OUT RECIPE PARALLEL:RECOMPUTATION:ACCUMULATION..."""

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.distributed.layouts import replicas
from ngpt_train.models import export_weights
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import ARCHITECTURES, SMALL
from tests.properties.runs import padded_rows, run_config, text_like_rows
from tests.reference.training import Recipe

ROWS, CONTEXT = 8, 32
SIZE = dataclasses.replace(SMALL, source_context=10)
RECIPES = {
    "gpt": Recipe(24, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=4),
    "normformer": Recipe(24, 6e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=4),
    "ngpt": Recipe(24, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0),
    "gpt_encoder_decoder": Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=2),
    "composed": Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=0.5, warmup_steps=2),
    "composed_encoder_decoder": Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=2),
    "ntransformer": Recipe(12, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0),
    "powernorm": Recipe(24, 6e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=4),
}
OPTIONS = {
    "gpt": ["optim.z_loss=0.01"],
    # Sinusoids outweigh so narrow an embedding at first; with rotary positions the model learns within the run.
    "normformer": ["model.positions=rotary"],
    "powernorm": ["model.statistics=synchronised", "model.psi_warmup_steps=4"],
    "composed": [
        *("model.norm=layer", "model.norm_placement=post", "model.ffn_norm=norm", "model.res_scale=both"),
        *("model.bias=true", "model.layer_scale=0.5", "model.embedding_gradient=0.5", "model.tied_embeddings=true"),
    ],
    "composed_encoder_decoder": [
        *("model.norm=layer_no_bias", "model.head_scale=before", "model.ffn_norm=norm", "model.bias=true"),
    ],
}
RECIPES |= {f"{name} with dropout": RECIPES[name] for name in ("gpt", "ntransformer")}
RECIPES["ngpt with nugpt"] = dataclasses.replace(RECIPES["ngpt"], lr=4e-3, eps=1e-16)
WITH = {
    "": [],
    "dropout": [
        *(f"model.{place}_dropout=0.05" for place in ("embedding", "residual", "attention")),
        "optim.label_smoothing=0.05",
    ],
    "nugpt": ["recipe=nugpt", *(f"model.reference.{key}={n}" for key, n in (("d_model", 8), ("steps", 100)))],
}


def digest(weights: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(weights[key].numpy().tobytes() for key in sorted(weights))).hexdigest()


def batch(name: str, step: int) -> tuple[Tensor, ...]:
    """The rows of a step, the same for every layout; the last ones count far fewer targets than the first."""
    if ARCHITECTURES[name].has_encoder:
        return padded_rows(ROWS, CONTEXT, SIZE, seed=step)
    return text_like_rows(ROWS, CONTEXT, SIZE.vocab_size, seed=step)


def one_run(recipe: str, parallel: str, recomputation: str, accumulation: int) -> dict[str, Any]:
    """What this rank reports of a run."""
    name, _, what = recipe.partition(" with ")
    options = [*OPTIONS.get(name, []), *WITH[what], f"train.activation_checkpointing={recomputation}"]
    config = run_config(
        name, SIZE, RECIPES[recipe], rows=ROWS, context=CONTEXT, micro_rows=1, parallel=parallel, options=options
    )
    if parallel == "hsdp":
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, shard=2))
    state = build_state(config)
    rank, size = state.world.rank, state.world.size
    rows = torch.arange(rank, ROWS, size)  # as TrainLoader: so a micro batch of all ranks is a run of rows
    initial = export_weights(state.model)
    losses, z_losses, norms, rates, tokens = [], [], [], [], []
    for step in range(config.train.steps):
        mine = [part[rows].chunk(accumulation) for part in batch(name, step)]
        result = train_step(state, list(zip(*mine, strict=True)), rows=rows)
        losses.append(result.loss.item())
        if result.z_loss is not None:
            z_losses.append(result.z_loss.item())
        norms.append(result.grad_norm.item())
        rates.append(float(result.lr))
        tokens.append(int(result.n_tokens))
    final = export_weights(state.model)
    # Not through the framework: what this rank itself holds.
    parameters = {key: p.detach() for key, p in state.model.named_parameters()}
    held = digest({key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in parameters.items()})
    return {
        "initial": digest(initial),
        "held": held,
        "losses": losses,
        "z_losses": z_losses,
        "norms": norms,
        "rates": rates,
        "tokens": tokens,
        "statistics": {key: x.double().norm().item() for key, x in state.model.statistics().items()},
        "unmoved": [key for key, x in final.items() if torch.equal(x, initial[key])],
        "off_sphere": max((x.norm(dim=-1) - 1).abs().max().item() for x in final.values() if x.ndim == 2),
        "replicas": max(map(replicas, parameters.values())),
        "sharded": any(isinstance(p, DTensor) for p in parameters.values()),
    }


def main(out: str, recipe: str, *runs: str) -> None:
    report = {}
    for run in runs:
        parallel, recomputation, accumulation = run.split(":")
        report[run] = one_run(recipe, parallel, recomputation, int(accumulation))
    Path(f"{out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without the interpreter's farewell: gloo's threads may still hold tensors, and torch 2.13 then deadlocks or
    # aborts when the process group is taken down.
    os._exit(0)
