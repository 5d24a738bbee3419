"""A run of test_replicas.py on this rank, under torchrun: OUT PARALLEL."""

import os
import sys
from dataclasses import replace

import torch

from ngpt_train.training import build_state, train_step
from ngpt_train.training.hooks.replicas import ReplicaError, check_replicas
from tests.processes.statistics_worker import batch, worker_config


def main(out: str, parallel: str) -> None:
    config = worker_config("pn", parallel, "per_rank", micro_rows=1)
    if parallel == "hsdp":
        config = replace(config, parallel=replace(config.parallel, shard=2))
    state = build_state(config)
    rank, size = state.world.rank, state.world.size
    for step in range(3):
        train_step(state, [[part.chunk(size)[rank] for part in batch(step)]])
        check_replicas(state)
    found = {}
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
        try:
            check_replicas(state)
        except ReplicaError as error:
            found[name] = str(error)
        element.copy_(before)
    flat = {name: (x.to_local() if hasattr(x, "to_local") else x).view(-1) for name, x in places.items()}
    swaps = {"swapped": (flat["vector"][0:1], flat["vector"][2:3])}
    swaps["swapped with another tensor"] = (flat["vector"][1:2], flat["moment"][1:2])
    for name, (one, other) in swaps.items():
        both = torch.cat([one, other])
        assert both[0] != both[1], "equal ones would change nothing"
        if rank == 1:
            one.copy_(both[1:]), other.copy_(both[:1])
        try:
            check_replicas(state)
        except ReplicaError as error:
            found[name] = str(error)
        one.copy_(both[:1]), other.copy_(both[1:])
    check_replicas(state)
    torch.save({"found": found, "vector": vector, "matrix": matrix}, f"{out}.{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without the interpreter's farewell, as in equality_worker.py.
    os._exit(0)
