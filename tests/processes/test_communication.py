"""What ranks tell each other in a step, call by call: nothing to project, and no gradient twice."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.communication import Collectives
from ngpt_train.models.layers.linear import FusedLinear
from ngpt_train.models.rank_rows import local_rows
from ngpt_train.optim.row_adam import RowAdam
from ngpt_train.training import TrainState, build_state, train_step
from ngpt_train.training.step import update_weights_
from tests.processes.launch import on_ranks
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

LAYOUTS = {"ddp": 2, "fsdp": 2, "hsdp": 4}  # ranks
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


def collectives_of_the_update(state: TrainState) -> Collectives:
    """Those of the optimizer's step and the projection, after gradients that push rows off the sphere."""
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Collectives() as counter:
        update_weights_(state, torch.tensor(1.0), torch.tensor(False), lr=0.5)
    return counter


def filled_up(matrices: Iterable[Tensor], ranks: int) -> int:
    """The bytes of matrices, whose rows FSDP2 fills up to equal shards."""
    shards = min(2, ranks)
    return sum(4 * -(-len(matrix) // shards) * shards * matrix.shape[1] for matrix in matrices)


def of_the_update(name: str, parallel: str, kernels: str) -> dict[str, Any]:
    state = state_of(name, parallel, f"kernels.kind={kernels}")
    assert isinstance(state.optimizer, RowAdam) == (kernels == "triton")
    counter = collectives_of_the_update(state)
    matrices = [parameter.detach() for parameter in state.model.parameters() if parameter.ndim == 2]
    rows = torch.cat([local_rows(matrix).norm(dim=1) for matrix in matrices])
    return {"collectives": len(counter.found), "off_sphere": (rows - 1).abs().max().item()}


def of_whole_steps(parallel: str, options: list[str], n_micro_batches: int) -> dict[str, Any]:
    """Three steps; collectives of the third, so that those before have changed between one micro batch and more."""
    state = state_of("ngpt", parallel, *options)
    losses = [take_step(state, 1), take_step(state, n_micro_batches)]
    with Collectives() as counter:
        losses.append(take_step(state, n_micro_batches))
    calls = {f"{x.kind} of {x.ranks}": [x.calls, x.bytes] for x in counter.by_kind()}
    matrices = [parameter for parameter in state.model.parameters() if parameter.ndim == 2]
    of_vectors = sum(4 * parameter.numel() for parameter in state.model.parameters() if parameter.ndim < 2)
    return {
        "calls": calls,
        "losses": losses,
        "blocks": len(state.model.blocks()),
        "of matrices": filled_up(matrices, state.world.size),
        "of vectors": of_vectors,
        "of parameters": 4 * state.model.n_params(),
    }


def of_a_matrix_step(name: str, parallel: str) -> dict[str, Any]:
    """Collectives of the optimizer's step, and the bytes of the blocks' matrices, filled up."""
    state = state_of("gpt", parallel, f"optim.name={name}")
    counter = collectives_of_the_update(state)
    matrices = [parameter for block in state.model.blocks() for parameter in block.parameters() if parameter.ndim == 2]
    named = sum(len(module.rows) for module in state.model.modules() if isinstance(module, FusedLinear))
    calls = {x.kind: [x.ranks, x.calls, x.bytes] for x in counter.by_kind()}
    shapes = len({matrix.shape for matrix in matrices})
    return {"calls": calls, "shapes": shapes, "bytes": filled_up(matrices, state.world.size), "named": named}


def of_all(parallel: str) -> dict[str, Any]:
    return {
        "matrix steps": {name: of_a_matrix_step(name, parallel) for name in ("muon", "adamh", "muonh")},
        "update": {
            f"{name}, {kernels}": of_the_update(name, parallel, kernels)
            for name, kernels in (("ngpt", "torch"), ("ngpt", "triton"), ("ntransformer", "torch"))
        },
        "steps": {
            f"{exchange}, {n}": of_whole_steps(parallel, options, n)
            for exchange, options in EXCHANGES.items()
            if exchange == "as it is" or "sdp" in parallel
            for n in ((1, 2) if exchange == "as it is" else (2,))
        },
    }


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[] if kind == "fsdp" else pytest.mark.slow) for kind in LAYOUTS]
)
def layout(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """What every rank reports, which must be the same."""
    reports = on_ranks(of_all, LAYOUTS[request.param], request.param)
    assert all(report["steps"] == reports[0]["steps"] for report in reports)
    worst = {
        case: max((report["update"][case] for report in reports), key=lambda x: (x["collectives"], x["off_sphere"]))
        for case in reports[0]["update"]
    }
    return request.param, {name: reports[0][name] for name in ("steps", "matrix steps")} | {"update": worst}


def test_the_projection_costs_no_collective(layout: tuple[str, dict[str, Any]]) -> None:
    """Caught: a projection of whole matrices, lengths of rows that ranks add up, by the optimizer's kernel too."""
    update = layout[1]["update"]
    assert sorted(update) == ["ngpt, torch", "ngpt, triton", "ntransformer, torch"]
    for found in update.values():
        assert found["collectives"] == 0
        assert found["off_sphere"] < 1e-6, "nothing was projected"


def test_what_matrix_optimizers_cost(layout: tuple[str, dict[str, Any]]) -> None:
    """Muon brings matrices of a shape to their ranks and the results back, in a call each; DDP has the matrices
    everywhere, and HSDP's results also go to the replicas. Gloo has no all-to-all: torch gathers all instead. Hyperball
    adds up three numbers of each named matrix over shards. Caught: a call for each matrix or norm, a result that is
    gathered twice."""
    calls, share = {"ddp": (1, 1), "fsdp": (2, 2), "hsdp": (3, 2.5)}[layout[0]]
    for name, found in layout[1]["matrix steps"].items():
        gathers = {"all-gather": [2, calls * found["shapes"], share * found["bytes"]]} if name != "adamh" else {}
        sums = {"all-reduce": [2, 1, 3 * 8 * found["named"]]} if name != "muon" and layout[0] != "ddp" else {}
        assert found["calls"] == gathers | sums, name


def test_what_a_step_costs(layout: tuple[str, dict[str, Any]]) -> None:
    """Caught: DDP that adds gradients up in each micro batch, FSDP2 that gathers or scatters more often than asked for,
    groups of HSDP that add up in each micro batch; options that change the run."""
    kind, steps = layout[0], layout[1]["steps"]
    ranks, shard = LAYOUTS[kind], 2
    for case, found in steps.items():
        exchange, n = case.rsplit(", ", 1)
        assert found["losses"] == pytest.approx(steps["as it is, 1"]["losses"], rel=1e-6)
        if kind == "ddp":
            # The number of targets, the loss, and the gradients, once.
            assert found["calls"] == {f"all-reduce of {ranks}": [3, 16 + found["of parameters"]]}
        else:
            passes = int(n)
            groups = found["blocks"] + 1  # with the embeddings, which are not gathered again to go back
            gathers = {
                "as it is": passes * (2 * groups - 1),
                "scatter step": passes * (2 * groups - 1),
                "gather micro_batch": passes * groups,
                "gather step, scatter step": groups,
            }[exchange]
            scatters = groups if "scatter step" in exchange else passes * groups
            calls = dict(found["calls"])
            assert calls.pop(f"all-gather of {shard}")[0] == gathers
            scattered = [scatters, scatters // groups * found["of matrices"]]
            assert calls.pop(f"reduce-scatter of {shard}") == scattered
            # Numbers of targets, the loss, the norm, and the gradients of the vectors.
            over_all = [4, 24 + found["of vectors"]]
            if kind == "fsdp":
                assert calls == {f"all-reduce of {ranks}": over_all}
            else:
                assert calls == {
                    f"all-reduce of {ranks}": over_all,
                    f"all-reduce of {ranks // shard}": [groups, found["of matrices"] // shard],
                }
