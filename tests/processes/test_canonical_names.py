"""A checkpoint holds weights, moments and averages under canonical names, whatever the layout."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.models import export_weights
from ngpt_train.models.weights import canonical, named_weights
from ngpt_train.training import build_state, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.state import TrainState
from tests.processes.launch import on_ranks
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe
from tests.stored import save_state, stored_tensors

ROWS, CONTEXT = 12, 16
RECIPE = Recipe(12, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)
UNEVEN = replace(SMALL, d_mlp=35)  # on three ranks, a shard of w_uv holds rows of both matrices


def built(name: str, parallel: str) -> TrainState:
    options = ["optim.ema_decay=0.8", *(["model.bias=true"] if name == "normformer" else [])]
    options += ["parallel.shard=2"] if parallel == "hsdp" else []
    name, _, optimizer = name.partition(" with ")
    options += [f"optim.name={optimizer}"] if optimizer else []
    config = run_config(
        name, UNEVEN, RECIPE, rows=ROWS, context=CONTEXT, micro_rows=1, parallel=parallel, options=options
    )
    return build_state(config)


def step(state: TrainState) -> float:
    rank, size = state.world.rank, state.world.size
    batch = text_like_rows(ROWS, CONTEXT, UNEVEN.vocab_size, seed=state.step)
    return train_step(state, [[part[rank::size] for part in batch]]).loss.item()


def local(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Everything that a checkpoint holds of this rank, by the parameters' names."""
    assert state.ema is not None
    for name, parameter in state.model.named_parameters():
        moments = state.optimizer.state[parameter]
        for kind, value in {"weight": parameter, "ema": state.ema.weights[name], **moments}.items():
            yield f"{kind} of {name}", (value.to_local() if isinstance(value, DTensor) else value).detach()
    yield from state.model.statistics().items()


def whole(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """The same by kind and canonical name, made from whole parameters."""
    assert state.ema is not None
    found: dict[str, dict[str, Tensor]] = {"model": export_weights(state.model)}
    named = dict(state.model.named_parameters())
    for (name, parameter), (_, parts) in zip(named.items(), named_weights(state.model), strict=True):
        for kind, value in {"ema": state.ema.weights[name], **state.optimizer.state[parameter]}.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            cut = full.ndim and len(parts) > 1
            rows = full.detach().split(list(parts.values())) if cut else [full.detach()] * len(parts)
            found.setdefault(kind, {}).update({canonical(part): x.clone() for part, x in zip(parts, rows, strict=True)})
    return found


def kept_and_loaded(name: str, parallel: str, directory: str) -> dict[str, Any]:
    """What this rank has stored, and finds again."""
    state = built(name, parallel)
    for _ in range(3):
        step(state)
    kept = save_state(Checkpoints(Path(directory), state.world, keep_last=1, keep_every=None), state)
    report = {"whole": whole(state), "sharded": any(isinstance(p, DTensor) for p in state.model.parameters())}
    expected = {key: x.clone() for key, x in local(state)}
    loss = step(state)
    other = built(name, parallel)
    step(other)
    load_state(kept, other)
    report["differ"] = [key for key, x in local(other) if not torch.equal(x, expected[key])]
    return report | {"goes on": step(other) == loss}


FAST = [("gpt", "single", 1), ("gpt with normuon", "fsdp", 3)]
SLOW = [
    ("ngpt", "fsdp", 3),
    ("normformer", "ddp", 2),
    ("ngpt with muonh", "ddp", 2),
    ("gpt with adamh", "hsdp", 4),
    ("powernorm", "fsdp", 3),
    ("normformer", "hsdp", 4),
    ("gpt_encoder_decoder", "fsdp", 3),
]

MORE = {"gpt with normuon": ["momentum_buffer", "mean_square"], "ngpt with muonh": ["momentum_buffer"]}


@pytest.mark.parametrize(
    ("name", "parallel", "ranks"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_names_and_shapes(name: str, parallel: str, ranks: int, tmp_path: Path) -> None:
    """In any layout, on other ranks too. Caught: fused matrices, parts cut at other rows, a rank whose rows of a part
    are lost, a checkpoint that does not load to the bit."""
    reports = on_ranks(kept_and_loaded, ranks, name, parallel, str(tmp_path))
    assert all(report["sharded"] == (parallel in ("fsdp", "hsdp")) for report in reports)
    expected = reports[0]["whole"]
    stored = stored_tensors(tmp_path / "step_00000003")
    assert stored.keys() - {"statistics"} == {"model", "exp_avg", "exp_avg_sq", "step", "ema", *MORE.get(name, [])}
    for kind, tensors in expected.items():
        assert stored[kind].keys() == tensors.keys()
        assert all(torch.equal(stored[kind][key], x) for key, x in tensors.items()), kind
    assert {"embedding", "layers.0.wq", "layers.0.wk", "layers.0.w_down"} <= stored["model"].keys()
    for report in reports:
        assert report["differ"] == []
        assert report["goes on"]
    alone = built(name, "single")
    load_state(tmp_path / "step_00000003", alone)
    assert whole(alone).keys() == expected.keys()
    for kind, tensors in whole(alone).items():
        assert all(torch.equal(x, expected[kind][key]) for key, x in tensors.items()), kind
