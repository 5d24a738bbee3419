"""Ranks that hold the same weights compare them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ngpt_train.training import build_state, train_step
from ngpt_train.training.hooks.replicas import ReplicaError, check_replicas
from tests.processes.launch import on_ranks
from tests.processes.test_statistics import batch, config_of


def damaged_replicas(parallel: str) -> dict[str, Any]:
    """What is found of each damage to rank 1."""
    config = config_of("pn", parallel, "per_rank", micro_rows=1)
    if parallel == "hsdp":
        config = replace(config, parallel=replace(config.parallel, shard=2))
    state = build_state(config)
    rank, size = state.world.rank, state.world.size
    for step in range(3):
        train_step(state, [[part.chunk(size)[rank] for part in batch(step)]])
        check_replicas(state)
    found = {}

    def look(name: str) -> None:
        try:
            check_replicas(state)
        except ReplicaError as error:
            found[name] = str(error)

    parameters = dict(state.model.named_parameters())
    vector = next(name for name, parameter in parameters.items() if parameter.ndim == 1)
    matrix = next(name for name, parameter in parameters.items() if parameter.ndim == 2)
    moment = state.optimizer.state[parameters[vector]]["exp_avg_sq"]
    places = {"vector": parameters[vector].data, "matrix": parameters[matrix].data, "moment": moment}
    for name, tensor in places.items():
        element = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).view(-1)[:1]
        before = element.clone()
        if rank == 1:  # the next number: a bit that has flipped
            element.copy_(torch.nextafter(element, torch.full_like(element, 9.0)))
        look(name)
        element.copy_(before)
    flat = {name: (x.to_local() if hasattr(x, "to_local") else x).view(-1) for name, x in places.items()}
    swaps = {"swapped": (flat["vector"][0:1], flat["vector"][2:3])}
    swaps["swapped with another tensor"] = (flat["vector"][1:2], flat["moment"][1:2])
    for name, (one, other) in swaps.items():
        both = torch.cat([one, other])
        assert both[0] != both[1], "equal ones would change nothing"
        if rank == 1:
            one.copy_(both[1:]), other.copy_(both[:1])
        look(name)
        one.copy_(both[:1]), other.copy_(both[1:])
    check_replicas(state)
    return {"found": found, "vector": vector, "matrix": matrix}


@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_a_flipped_bit_and_a_swap_are_found(parallel: str, ranks: int) -> None:
    """Caught: a weight or a moment of one rank that differs in its last bit; elements that have changed places; a false
    alarm for running statistics of ranks, or for the rows of a matrix that only one rank has."""
    reports = on_ranks(damaged_replicas, ranks, parallel)
    assert all(report == reports[0] for report in reports), "all ranks end together"
    found, vector, matrix = (reports[0][name] for name in ("found", "vector", "matrix"))
    expected = {"vector": vector, "moment": f"exp_avg_sq of {vector}"}
    expected |= {"swapped": vector, "swapped with another tensor": vector}
    if parallel != "fsdp":
        expected["matrix"] = matrix
    assert found.keys() == expected.keys()
    # Groups of HSDP are ranks 0 and 1, 2 and 3: ranks 1 and 3 have the same shards.
    for place, name in expected.items():
        blamed = "ranks 1 and 3" if (parallel, place) == ("hsdp", "matrix") else "ranks 0 and 1"
        assert found[place].startswith(f"step 3: {name} differs between {blamed}")
