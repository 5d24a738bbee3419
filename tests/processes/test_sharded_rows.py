"""RowAdam on shards: the same weights as on one process. Its collectives: test_communication.py."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ngpt_train.kernels import dispatch
from ngpt_train.optim.row_adam import RowAdam
from ngpt_train.training import build_state, train_step
from tests.processes.launch import on_ranks
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

STEPS, ROWS, CONTEXT = 3, 2, 8
RECIPE = Recipe(12, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)
SHAPES = {"one row": (1, 16), "five rows": (5, 16), "eight rows": (8, 24)}


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def of_a_model(parallel: str) -> dict[str, Any]:
    """Three steps of nGPT, whose vocabulary does not divide by two."""
    config = run_config("ngpt", SMALL, RECIPE, rows=ROWS, context=CONTEXT, micro_rows=1, parallel=parallel)
    config.kernels.kind = "triton"
    state = build_state(config)
    assert isinstance(state.optimizer, RowAdam)
    state.model.project_ = lambda: sys.exit("a second pass over the rows")
    rank, size = state.world.rank, state.world.size
    losses = []
    for index in range(STEPS):
        batch = text_like_rows(ROWS, CONTEXT, SMALL.vocab_size, seed=index)
        losses.append(train_step(state, [[part.chunk(size)[rank] for part in batch]]).loss.item())
    parameters = dict(state.model.named_parameters())
    moments = {
        f"{name}.{key}": whole(x) for name, p in parameters.items() for key, x in state.optimizer.state[p].items()
    }
    return {
        "losses": losses,
        "weights": {name: whole(p) for name, p in parameters.items()} | moments,
        "sharded": any(isinstance(p, DTensor) for p in parameters.values()),
    }


def of_matrices(sharded: bool) -> dict[str, Any]:
    """Three steps and one that is skipped; of the first matrix the second rank holds no row."""
    draw = torch.Generator().manual_seed(0)
    module = nn.ParameterDict(
        {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}
    )
    mesh = init_device_mesh("cpu", (2,)) if sharded else None
    if mesh is not None:
        fully_shard(module, mesh=mesh)
    parameters = dict(module.named_parameters())
    optimizer = RowAdam([{"params": list(parameters.values())}], ["sphere"], lr=0.1, betas=(0.9, 0.95))
    before: dict[str, Tensor] = {}
    for step in range(4):
        for name, parameter in parameters.items():
            gradient = torch.randn(SHAPES[name], generator=draw)
            parameter.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(step == 3))
        before = {name: whole(p) for name, p in parameters.items()}
        optimizer.step()
    after = {name: whole(p) for name, p in parameters.items()}
    return {
        "weights": after,
        "steps": [optimizer.state[p]["step"].item() for p in parameters.values()],
        "unchanged by the skipped step": all(torch.equal(after[name], x) for name, x in before.items()),
        "rows held": [len(p.to_local() if isinstance(p, DTensor) else p) for p in parameters.values()],
    }


def of_both(parallel: str) -> dict[str, Any]:
    dispatch.choose("triton")
    slow = ("linear_cross_entropy", "rotary", "sphere_step", "swiglu")
    dispatch.switch_off(dict.fromkeys(slow, "in the interpreter they take most of the time"))
    return {"model": of_a_model(parallel), "matrices": of_matrices(parallel == "fsdp")}


def test_shards_equal_one_process() -> None:
    """Caught: a rank without rows that forgets its step, moments of another shard, lengths of parts of rows. (That it
    launches no kernel shows on a GPU alone.)"""
    (single,) = on_ranks(of_both, 1, "single")  # the kernels that it chooses are for a process
    ranks = on_ranks(of_both, 2, "fsdp")
    assert not single["model"]["sharded"]
    assert [rank["matrices"]["rows held"] for rank in ranks] == [[4, 3, 1], [4, 2, 0]]
    for rank in ranks:
        model, matrices = rank["model"], rank["matrices"]
        assert model["sharded"]
        assert model["losses"] == pytest.approx(single["model"]["losses"], rel=1e-6)
        for key, x in single["model"]["weights"].items():
            assert (model["weights"][key] - x).norm() <= 1e-4 * x.norm(), key  # the ranks' sums round otherwise
        for key, x in single["matrices"]["weights"].items():
            assert torch.equal(matrices["weights"][key], x), key
            torch.testing.assert_close(x.norm(dim=1), torch.ones(len(x)))
        assert matrices["steps"] == [3, 3, 3]
        assert matrices["unchanged by the skipped step"]
