"""Layouts of a single-device model for training: activation checkpointing, then compile, then FSDP2 (HSDP) or DDP. Then
what ranks exchange in a step: statistics of a batch whose rows are spread over ranks, and gradients."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ngpt_train.config.keys import AUTO
from ngpt_train.core.constants import IGNORED
from ngpt_train.core.errors import ConfigError, told_by_rank_0
from ngpt_train.core.log import say_once
from ngpt_train.distributed.compilation import begin_graph_step_at_forward, check_cuda_graphs, keep_compiled
from ngpt_train.distributed.recomputation import checkpoint_blocks
from ngpt_train.kernels import attention, dispatch
from ngpt_train.models import build_model
from ngpt_train.models.rank_rows import is_sharded, replicas

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from ngpt_train.config.schema import Config
    from ngpt_train.config.sections.training import ParallelConfig
    from ngpt_train.distributed.world import World
    from ngpt_train.models.decoder import Decoder

# DDP must not overwrite a rank's running statistics with rank 0's. torch 2.13 has renamed the option.
_HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_KEEP_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _HAS_NEW_NAME else "broadcast_buffers": False}

CACHED_NUMBERS = 2**15  # in fp64 they stay in a core's cache

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_kind(kind: str, world_size: int, device_type: str, local_size: int | None = None) -> str:
    """`parallel.kind` with auto resolved. local_size: ranks of a host, by default all. Raises ConfigError for
    kind=single with several ranks."""
    if kind == "single" and world_size > 1:
        problem = f"parallel.kind=single: one process, but there are {world_size} ranks"
        raise ConfigError(f"{problem}. Use parallel=ddp, fsdp or hsdp, or one rank.")
    if kind != AUTO:
        return kind
    if world_size == 1:
        return "single"
    if device_type != "cuda":
        return "ddp"
    return "fsdp" if local_size in (None, world_size) else "hsdp"


def resolve_shard(config: ParallelConfig, kind: str, world_size: int, local_size: int) -> int:
    """The number of ranks that share a matrix; 0 without FSDP2. Raises ConfigError if they do not divide the ranks."""
    if kind != "hsdp":
        return world_size if kind == "fsdp" else 0
    shard = min(local_size, world_size) if config.shard == AUTO else int(config.shard)
    if world_size % shard:
        problem = f"parallel.kind=hsdp: groups of {shard} ranks do not divide {world_size} ranks"
        raise ConfigError(f"{problem}. Use as many ranks on each host, or set parallel.shard.")
    return shard


def check_hosts(world: World) -> None:
    """Raises ConfigError on every rank unless all hosts have the same number of ranks. A collective call."""
    sizes = sorted(set(world.gather(world.local_size)))
    if len(sizes) > 1:
        problem = f"groups are the ranks of a host, and hosts have {' or '.join(map(str, sizes))} of them"
        remedy = f"Start as many ranks on each host, or set parallel.shard to a divisor of {world.size}."
        raise told_by_rank_0(ConfigError(f"parallel.shard=auto: {problem}. {remedy}"))


def resolve_precision(precision: str, device_type: str) -> torch.dtype:
    """The dtype of activations and matrix products for `train.precision`, with auto resolved."""
    if precision == AUTO:
        precision = "bf16" if device_type == "cuda" else "fp32"
    return PRECISIONS[precision]


def why_precision(device_type: str) -> str:
    """Why `train.precision=auto` is resolved as `resolve_precision` says."""
    if device_type == "cuda":
        return "this is a GPU"
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # not in every torch
    if any(has.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")):
        return "this is a CPU; train.precision=bf16 may be faster on it, with other losses"
    return "this is a CPU"


def resolve_compile(compiled: bool | str, device_type: str) -> bool:
    """`train.compile` with auto resolved."""
    return device_type == "cuda" if compiled == AUTO else bool(compiled)


def parallelize(config: Config, world: World, micro_rows: int) -> tuple[Decoder, nn.Module]:
    """Builds the model of `config` for this world, with the weights of step 0.

    Returns the model, and the module that a training step calls: DDP around the model, or else the model itself.
    Weights are fp32, and the same for every layout and number of ranks. Raises ConfigError if the layout, the kernels
    or CUDA graphs do not fit the ranks and the device.
    """
    kind = resolve_kind(config.parallel.kind, world.size, world.device.type, world.local_size)
    precision = resolve_precision(config.train.precision, world.device.type)
    choose_kernels(config, world.device, precision)
    if config.train.cuda_graphs:
        check_cuda_graphs(world.device)
    sharded = kind in ("fsdp", "hsdp")
    with torch.device("meta") if sharded else world.device:
        model = build_model(config.model, config.run.seed)
    model.compute_dtype = None if precision == torch.float32 else precision
    model.z_loss, model.label_smoothing = config.optim.z_loss, config.optim.label_smoothing
    if world.size > 1 and config.model.synchronises_statistics:
        synchronise_statistics(model)
    checkpoint_blocks(model.blocks(), config.train.activation_checkpointing)
    if resolve_compile(config.train.compile, world.device.type):
        keep_compiled(config)
        for block in model.blocks():
            block.compile(dynamic=False, mode="reduce-overhead" if config.train.cuda_graphs else None)
    if config.train.cuda_graphs:
        begin_graph_step_at_forward(model)
    if sharded:
        if kind == "hsdp" and config.parallel.shard == AUTO:
            check_hosts(world)
        n_shards = resolve_shard(config.parallel, kind, world.size, world.local_size)
        shard(model, world, n_shards, keep_whole=config.parallel.gather != "pass")
        model.to_empty(device=world.device)
        model.init_weights_(config.run.seed)
    if kind == "ddp":
        return model, replicate(model, world, torch.zeros(micro_rows, config.model.context, dtype=torch.long))
    return model, model


def choose_kernels(config: Config, device: torch.device, precision: torch.dtype) -> None:
    """Sets the kernels of this process. Raises ConfigError if they cannot run."""
    try:
        dispatch.choose(config.kernels.kind)
        attention.choose(config.kernels.attention, device, config.model.d_head, precision)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    say_once(logging.INFO, dispatch.described(device))
    if config.train.deterministic:
        be_deterministic()


def be_deterministic() -> None:
    """Restricts torch to algorithms that give the same bits each time (train.deterministic). Before the first product
    on a GPU, because cuBLAS reads its variable once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Our kernels write all memory that they allocate.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    """Gains, biases and scale vectors: all parameters that are not matrices."""
    return [parameter for parameter in model.parameters() if parameter.ndim < 2]


def shard(model: Decoder, world: World, n_shards: int, keep_whole: bool = False) -> None:
    """FSDP2 over groups of n_shards ranks. Gradients are averaged over groups too.

    Each block is gathered as one, the embeddings as another. keep_whole: True keeps a block whole between its forward
    and backward pass, as the embeddings always are.

    The matrices of blocks are gathered in the compute dtype. FSDP2 would cast the vectors with them, which must stay
    fp32. So they stay whole on every rank, where 11 d_model values per layer cost nothing, and `average_vectors_`
    averages their gradients. The embeddings are gathered in fp32 and cast at use, as on a single device, so that the
    gradients of a repeated token are summed in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # FSDP2 warns of blocks that return a view, as nGPT's do. Its hooks would miss changes in place, but there are none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    replicated = n_shards < world.size
    shape = (world.size // n_shards, n_shards) if replicated else (n_shards,)
    names = ("replicate", "shard") if replicated else ("shard",)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    whole = set(vectors(model))
    policy = partial(MixedPrecisionPolicy, reduce_dtype=torch.float32, cast_forward_inputs=False)
    of_blocks = policy(param_dtype=model.compute_dtype)
    for block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=of_blocks, ignored_params=whole, reshard_after_forward=not keep_whole)
    fully_shard(model, mesh=mesh, mp_policy=policy(), ignored_params=whole)


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `shard` has made it FSDP2's. Before the first `shard` its class, with DTensor, may not be imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def replicate(model: Decoder, world: World, tokens: Tensor) -> nn.Module:
    """The model in DDP, with DDP's buckets in their final order.

    After its first backward pass, which has one bucket, DDP groups gradients by their order of arrival, which rounds
    sums differently: a resumed run would differ from an uninterrupted one. So every process does the first backward
    pass here, on tokens `(micro_rows, context)`, and drops the gradients.
    """
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        init_sync=False,  # every rank drew the same weights
        **_KEEP_OWN_BUFFERS,
        gradient_as_bucket_view=True,
    )
    tokens = tokens.to(world.device)
    targets = tokens.clone()
    targets[:, model.config.predicted(tokens.shape[1]) :] = IGNORED
    was_training = model.training
    model.eval()
    ddp(tokens, targets).total.backward()
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return ddp


def mesh_of_replicas(forward: nn.Module, world: World) -> DeviceMesh | None:
    """The ranks that all have the whole model, under DDP; else None."""
    return init_device_mesh(world.device.type, (world.size,)) if isinstance(forward, DistributedDataParallel) else None


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks. Its gradient is also summed over ranks, because the input of each rank changes every loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def synchronise_statistics(model: nn.Module) -> None:
    """Makes norms over the batch, which have an attribute `over_ranks`, take their statistics over the rows of all
    ranks. Each forward and backward pass is then collective."""
    for module in model.modules():
        if hasattr(module, "over_ranks"):
            setattr(module, "over_ranks", _SumOverRanks.apply)  # noqa: B010 (types: a Module has no such attribute)


@contextmanager
def averaged_statistics(model: Decoder, world: World) -> Iterator[None]:
    """Inside, running statistics are means over ranks. Afterwards they are the rank's own. A collective call."""
    own = {name: value.clone() for name, value in model.statistics().items()}
    for value in model.statistics().values():
        value.copy_(world.sum_(value.clone()) / world.size)
    try:
        yield
    finally:
        for name, value in model.statistics().items():
            value.copy_(own[name])


def accumulating(forward: nn.Module, config: ParallelConfig, last: bool) -> AbstractContextManager[None]:
    """The context of a micro batch. forward: DDP, or the model; last: True for the last micro batch of a step.

    DDP sums gradients over ranks in the last micro batch only. FSDP2 scatters the gradients of each micro batch: a rank
    that accumulated whole gradients would need the memory that sharding saves. With scatter=step it does accumulate
    them. With gather=step the matrices stay whole until the last backward pass. Groups of HSDP exchange their shards in
    the last micro batch only, which takes no memory.
    """
    if isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    if is_fsdp(forward):
        forward.set_requires_gradient_sync(last or config.scatter == "micro_batch")
        forward.set_requires_all_reduce(last)
        forward.set_reshard_after_backward(last or config.gather != "step")
    return nullcontext()


def average_vectors_(model: nn.Module, world: World) -> None:
    """Under FSDP2, averages the gradients of the vectors, which are not sharded, over ranks in one collective."""
    sharded = is_fsdp(model)
    if not sharded or world.size == 1:
        return
    gradients = [parameter.grad for parameter in vectors(model) if parameter.grad is not None]
    flat = world.sum_(torch.cat(gradients)) / world.size
    torch._foreach_copy_(gradients, list(flat.split([gradient.numel() for gradient in gradients])))


def gradient_norm(parameters: Iterable[nn.Parameter], world: World) -> Tensor:
    """L2 norm of all gradients, 0-dim fp64 on the device, the same on every rank. Collective if sharded. On CPUs the
    sums are in fp64, because fp32 sums of millions of entries lose three digits there."""
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    n_replicas = 1
    for parameter in parameters:
        gradient = parameter.grad
        if is_sharded(gradient):
            sharded.append(gradient.to_local())
            n_replicas = replicas(gradient)
        elif gradient is not None:
            whole.append(gradient)
    total = _sum_of_squares(sharded, world.device)
    if sharded:
        total = world.sum_(total) / n_replicas
    return (total + _sum_of_squares(whole, world.device)).sqrt()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float32
    if device.type == "cpu":  # sums in fp64, for which torch casts a whole tensor: here pieces, which stay in the cache
        dtype = torch.float64
        tensors = [piece for tensor in tensors for piece in tensor.flatten().split(CACHED_NUMBERS)]
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return torch.stack(list(norms)).double().square().sum()
