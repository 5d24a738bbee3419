"""Counts the memory of a pass through a model on tensors without memory, on torch's device `meta`."""

import importlib.util
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.distributed.recomputation import ATTENTION, PRODUCTS, checkpoint_blocks
from ngpt_train.kernels import dispatch
from ngpt_train.models import build_model
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.rank_rows import local_rows


class MemoryCounter(TorchDispatchMode):
    """Bytes of tensors made inside and still held, `now`, and their `peak`; not what an operator needs as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.recent_peak = 0  # since somebody set it to `now`
        self._held: dict[int, int] = {}  # bytes, by the address of the storage

    def note(self, tensor: Tensor) -> None:
        """Counts the memory of `tensor`, once, until nobody holds it."""
        storage = local_rows(tensor).untyped_storage()
        if storage._cdata not in self._held:
            self._held[storage._cdata] = 0
            self._resized(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._freed, storage._cdata)

    def _resized(self, address: int, size: int) -> None:
        self.now += size - self._held[address]
        self._held[address] = size
        self.peak, self.recent_peak = max(self.peak, self.now), max(self.recent_peak, self.now)

    def _freed(self, address: int) -> None:
        self.now -= self._held.pop(address)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return out


@contextmanager
def counting(counter: MemoryCounter) -> Iterator[None]:
    """Inside, `counter` counts, also under FSDP2, which keeps a tensor and frees its memory by resizing its storage."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        if storage._cdata in counter._held:
            counter._resized(storage._cdata, size)

    with patch.object(torch.UntypedStorage, "resize_", resized), counter:
        yield


@dataclass(frozen=True)
class Pass:
    """Bytes of a forward and backward pass over a micro batch, besides weights, their casts and their gradients."""

    kept: float  # at the end of the forward pass, without the memory of the loss
    working: float  # peak of the backward pass above the end of the forward pass
    of_stages: tuple[float, ...]  # `working` up to the end of the decoder's last block, and in the encoder's last block


@dataclass(frozen=True)
class Products:
    """Bytes of the inputs and results of products and attention in a forward pass of all blocks, each tensor once."""

    hidden: float  # the hidden states that enter the blocks, and the encoder's result
    results: float  # without a block's last result, where it is only added to h
    arguments: float  # inputs that are not among the results
    widest: float  # the largest result


class Stage:
    """`working`: the peak of a block's backward pass above its begin."""

    def __init__(self, counter: MemoryCounter, block: nn.Module) -> None:
        self.working = 0
        self._counter = counter
        self._held: int | None = None
        block.register_forward_pre_hook(lambda _, given: self._at_gradients(given[0], self.end))
        block.register_forward_hook(lambda _, given, made: self._at_gradients(made, self.begin))

    def begin(self, gradient: Tensor | None = None) -> None:
        """gradient: by the block's result; it counts as memory of the pass."""
        if self._held is None:
            self._held = self._counter.now - (0 if gradient is None else gradient.nbytes)
            self._counter.recent_peak = self._counter.now

    def end(self, gradient: Tensor) -> None:
        assert self._held is not None
        self.working = self._counter.recent_peak - self._held

    @staticmethod
    def _at_gradients(hidden: Any, then: Callable[[Tensor], None]) -> None:
        """Calls `then` when the backward pass has the gradients by the tensors in `hidden`. PowerNorm's blocks also
        return statistics, which have no gradient."""
        for leaf in tree_leaves(hidden):
            if leaf.requires_grad:
                leaf.register_hook(then)


FEW = 2  # blocks of a kind in the model that is counted

P = ParamSpec("P")
Counted = TypeVar("Counted", Pass, Products)


def once(count: Callable[P, Counted]) -> Callable[P, Counted]:
    """`count`, which takes a second, once for the same arguments: `choose` asks for each pass under several layouts.
    A config is not hashable, so arguments are known by their repr."""
    known: dict[str, Counted] = {}

    @wraps(count)
    def counted(*args: P.args, **kwargs: P.kwargs) -> Counted:
        arguments = repr((args, kwargs))
        if arguments not in known:
            known[arguments] = count(*args, **kwargs)
        return known[arguments]

    return counted


@once
def count_pass(
    shape: ModelConfig, dtype: torch.dtype, rows: int, recompute: str, on_gpu: bool, kernels: bool, new_gradients: bool
) -> Pass:
    """The memory of an uncompiled pass over `rows` rows, training, with products in `dtype`.

    recompute: train.activation_checkpointing. kernels: True if Triton's kernels run. new_gradients: True if the
    backward pass makes gradients, False if it adds to those of an earlier micro batch.
    """

    def count(few: ModelConfig) -> list[float]:
        with on_meta(), as_on_gpu(kernels) if on_gpu else nullcontext():
            model, inputs, seeds = prepared(few, dtype, rows)
            checkpoint_blocks(model.blocks(), recompute)
            counter = MemoryCounter()
            blocks = model.blocks()
            stages = [Stage(counter, block) for block in (blocks[-1], *blocks[: -few.n_layers][-1:])]
            with counting(counter):
                for parameter in model.parameters():  # views of them are kept too
                    counter.note(parameter)
                # Gradients of an earlier micro batch. Made here, since the sum with the next ones may replace them.
                for parameter in () if new_gradients else model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                before = counter.now
                loss = model(*inputs, **seeds).total
                kept, counter.peak = counter.now - before, counter.now
                stages[0].begin()
                loss.backward()
                working = counter.peak - before - kept
            targets = rows * (few.predicted(few.context) - few.source_length(few.context))
            of_loss = gradients_of_loss(model, targets, dtype.itemsize)
        return [kept - of_loss, working, *(stage.working for stage in stages)]

    (kept, *_), (_, working, *of_stages) = of_all_blocks(shape, count)
    return Pass(kept, working, tuple(of_stages))


@once
def count_products(shape: ModelConfig, dtype: torch.dtype, rows: int) -> Products:
    """The memory of products and attention in a forward pass over `rows` rows."""

    def count(few: ModelConfig) -> list[float]:
        with on_meta():
            model, inputs, seeds = prepared(few, dtype, rows)
            counter = ProductCounter(rows)
            for block in model.blocks():
                block.forward = counter.watching(block.forward)
            model(*inputs, **seeds)
        return [counter.hidden, counter.results, counter.arguments, counter.widest]

    (hidden, results, arguments, _), (*_, widest) = of_all_blocks(shape, count)
    return Products(hidden, results, arguments, widest)


def depths_of(shape: ModelConfig) -> dict[str, int]:
    """The numbers of blocks of the decoder and, if there is one, of the encoder, by key."""
    return {name: getattr(shape, name) for name in ("n_layers", "n_encoder_layers") if getattr(shape, name, None)}


def of_all_blocks(shape: ModelConfig, count: Callable[[ModelConfig], list[float]]) -> tuple[list[float], list[float]]:
    """The numbers of `count` for the whole model, and for a model with few blocks. Every block of a kind adds as much
    as the next, so the first are computed from the second."""
    depths = depths_of(shape)
    few: dict[str, Any] = {name: min(depth, FEW) for name, depth in depths.items()}
    base = count(replace(shape, **few))
    whole = list(base)
    for name, depth in depths.items():
        if depth > FEW:
            deeper = count(replace(shape, **(few | {name: FEW + 1})))
            whole = [sum_ + (depth - FEW) * (more - less) for sum_, more, less in zip(whole, deeper, base, strict=True)]
    return whole, base


@contextmanager
def as_on_gpu(kernels: bool) -> Iterator[None]:
    """Inside, a pass on a CPU keeps the same tensors as on a GPU: if `kernels` and the package triton is there, for
    Triton's kernels, which do not run on tensors without memory."""
    choice = "triton" if kernels and importlib.util.find_spec("triton") else "torch"
    with patch.object(dispatch, "_choice", choice):
        yield


@contextmanager
def on_meta() -> Iterator[None]:
    """Inside, tensors have no memory, and attention is torch's kernel for CPUs, which keeps what those for GPUs keep;
    for tensors without memory torch would write the formula out."""
    with torch.device("meta"), patch.object(F, "scaled_dot_product_attention", cpu_attention):
        yield


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """Without memory, q, k and v `(B, H, T, D)`, what scaled_dot_product_attention does on a CPU."""
    if mask is not None:
        mask = torch.empty_like(mask, dtype=q.dtype)  # a boolean mask is added as 0 and -inf
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]


def prepared(shape: ModelConfig, dtype: torch.dtype, rows: int) -> tuple[Decoder, list[Tensor], dict[str, Tensor]]:
    """The model, and tokens, targets and seeds for it. Its blocks' matrices are in `dtype`, so no casts are counted."""
    model = build_model(shape)
    model.compute_dtype = None if dtype == torch.float32 else dtype
    for block in model.blocks():
        for module in block.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 2:
                    setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=dtype)))
    tokens = torch.zeros(rows, shape.context, dtype=torch.long)
    seeds = {"seeds": torch.zeros(rows, dtype=torch.long)} if shape.uses_dropout else {}
    return model, [tokens, tokens], seeds


def gradients_of_loss(model: Decoder, tokens: int, size: int) -> int:
    """Bytes of the gradients of a loss over `tokens` tokens, by the output embedding and by h."""
    vocab_size, d_model = model.unembedding.shape
    return 4 * vocab_size * d_model + size * tokens * d_model


# Operators whose backward pass does not need their inputs.
ONLY_ADD = (
    torch.ops.aten.add.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.prim.device.default,
)


class ProductCounter(TorchDispatchMode):
    """Counts the inputs and results of products and attention in the watched blocks."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self.hidden = self.results = self.arguments = self.widest = 0
        self._seen: dict[int, torch.UntypedStorage] = {}  # holding a storage keeps its address from others
        self._last: tuple[int, int] = (0, 0)  # address and bytes of the last result; 0 bytes: something read it

    def watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of a block, counted."""

        def run(h: Any, *arguments: Any) -> Any:
            given = [x for x in tree_leaves((h, *arguments)) if isinstance(x, Tensor) and x.is_floating_point()]
            # The hidden state, and the encoder's result, which all blocks of the decoder read.
            self.hidden += sum(self._new(leaf) for leaf in given if len(leaf) == self._rows)
            with self:
                out = forward(h, *arguments)
            self.results -= self._last[1]
            return out

        return run

    def _new(self, tensor: Tensor) -> int:
        """Bytes of the tensor, 0 if its memory has been counted."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = storage
        return storage.nbytes()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function not in ONLY_ADD and any(
            isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == self._last[0] for leaf in tree_leaves(args)
        ):
            self._last = (0, 0)
        is_attention = any(name in str(function) for name in ATTENTION)
        if is_attention or function in PRODUCTS:
            self.arguments += sum(self._new(tensor) for tensor in (args[:3] if is_attention else args[-2:-1]))
            made = sum(self._new(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self.results += made
            self._last = (out.untyped_storage()._cdata, made) if function in PRODUCTS else (0, 0)
            self.widest = max(self.widest, made)
        return out
