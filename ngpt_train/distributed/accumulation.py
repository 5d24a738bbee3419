"""Communication between ranks in one of several micro batches of a step."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ngpt_train.config.sections.parallel import ParallelConfig


def accumulating(forward: nn.Module, config: ParallelConfig, last: bool) -> AbstractContextManager[None]:
    """The context of a micro batch. forward: what `parallelize` gives; last: whether it is the last of its step.

    DDP adds gradients up in the last micro batch only. FSDP2 scatters those of each micro batch, because a rank that
    accumulated whole gradients would need the memory that sharding saves; with scatter=step it does so. With
    gather=step the matrices stay whole until the last backward pass. Groups of HSDP add up their shards in the last
    micro batch only, which takes no memory.
    """
    if isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    if isinstance(forward, FSDPModule):
        forward.set_requires_gradient_sync(last or config.scatter == "micro_batch")
        forward.set_requires_all_reduce(last)
        forward.set_reshard_after_backward(last or config.gather != "step")
    return nullcontext()
