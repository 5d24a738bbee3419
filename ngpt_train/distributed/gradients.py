"""Gradients from the micro batches to the optimizer: when ranks exchange them, averages over ranks, and the norm."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ngpt_train.config.sections.training import ParallelConfig
from ngpt_train.distributed.layouts import replicas, vectors
from ngpt_train.distributed.world import World


def accumulating(forward: nn.Module, config: ParallelConfig, last: bool) -> AbstractContextManager[None]:
    """The context of a micro batch. forward: DDP, or the model; last: True for the last micro batch of a step.

    DDP sums gradients over ranks in the last micro batch only. FSDP2 scatters the gradients of each micro batch: a rank
    that accumulated whole gradients would need the memory that sharding saves. With scatter=step it does accumulate
    them. With gather=step the matrices stay whole until the last backward pass. Groups of HSDP exchange their shards in
    the last micro batch only, which takes no memory.
    """
    if isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    if isinstance(forward, FSDPModule):
        forward.set_requires_gradient_sync(last or config.scatter == "micro_batch")
        forward.set_requires_all_reduce(last)
        forward.set_reshard_after_backward(last or config.gather != "step")
    return nullcontext()


def average_vectors_(model: nn.Module, world: World) -> None:
    """Under FSDP2, averages the gradients of the vectors, which are not sharded, over ranks in one collective."""
    if world.size == 1 or not isinstance(model, FSDPModule):
        return
    gradients = [parameter.grad for parameter in vectors(model) if parameter.grad is not None]
    flat = world.sum_(torch.cat(gradients)) / world.size
    torch._foreach_copy_(gradients, list(flat.split([gradient.numel() for gradient in gradients])))


def gradient_norm(parameters: Iterable[nn.Parameter], world: World) -> Tensor:
    """L2 norm of all gradients, 0-dim fp64 on the device, the same on every rank. Collective if sharded.

    On CPUs the sums are in fp64, because fp32 sums of millions of entries lose three digits there.
    """
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    n_replicas = 1
    for parameter in parameters:
        match parameter.grad:
            case DTensor() as gradient:
                sharded.append(gradient.to_local())
                n_replicas = replicas(gradient)
            case Tensor() as gradient:
                whole.append(gradient)
    total = _sum_of_squares(sharded, world.device)
    if sharded:
        total = world.sum_(total) / n_replicas
    return (total + _sum_of_squares(whole, world.device)).sqrt()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return torch.stack(list(norms)).double().square().sum()
