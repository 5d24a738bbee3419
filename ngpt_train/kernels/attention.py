"""softmax(scale q k^T) v, and the choice of its kernel: `kernels.attention=auto|sdpa|flash_attn|flex`.

    rows of one document          auto, sdpa, flex  torch's scaled_dot_product_attention ("sdpa")
                                  flash_attn        the package's flash_attn_func
    rows of several documents     auto              a varlen kernel where one runs, else the boolean mask
                                  sdpa              the boolean mask
                                  flash_attn        the package's flash_attn_varlen_func
                                  flex              torch's flex_attention
    any other boolean mask        all               sdpa with this mask
    dropout, in training          auto, sdpa        the formula written out: no kernel's dropout is a function of the
                                                    row

A varlen kernel takes the documents as sequences laid end to end, and does no work for pairs of tokens from two
documents. It is flash-attn's if the package is installed, else torch's own. flex_attention skips the blocks of the mask
that are all false. sdpa with a boolean mask computes all pairs of tokens, and runs everywhere.

The scale is always passed, because nGPT's is sqrt(D), and the default of each kernel is 1/sqrt(D).

On a CPU in bf16 the backward pass of small heads is in fp32: there torch's backward kernel for CPUs takes up to 3.5
times as long in bf16, and rounds more (docs/benchmarks/step.md). The forward kernel is faster in bf16.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.core.log import called_at_tracing, say_once
from ngpt_train.kernels import dispatch, flash
from ngpt_train.kernels.dropout import dropout
from ngpt_train.kernels.flash import Flash, NoKernel, Varlen
from ngpt_train.kernels.norm import at_least_fp32, on_cpu

CHOICES = ("auto", "sdpa", "flash_attn", "flex")
LARGEST_VARLEN_HEAD = 192  # larger heads have no backward pass on some GPUs
LARGE_HEAD = 64  # on a CPU in bf16: of this size and more, fp32 is faster in short rows alone

_choice = "auto"
_watch: "Watch | None" = None  # of `watched`
_flash: Flash | None = None  # the version of flash-attn in use, with kernels.attention=flash_attn


class Packed(NamedTuple):
    """The rows of a batch laid end to end, cut into documents."""

    kernel: Varlen
    boundaries: Tensor  # int32: the first token of each document, then B T, repeated up to a fixed length
    longest: int  # no document is longer


class Blocks(NamedTuple):
    """A mask in flex_attention's form: the blocks to compute, and which pairs of tokens count in them."""

    mask: Any  # torch.nn.attention.flex_attention.BlockMask


# The keys that a query sees. Tensor: a boolean that broadcasts to (B, H, T, S), true for a visible key. Packed: the
# query's own key and the earlier keys of its document. Blocks: as flex_attention's mask says. None: all keys or, with
# causal attention, the query's own key and all earlier keys.
Mask = Tensor | Packed | Blocks | None


# Is given q, k, scale, causal and mask of a call of `attention`.
Watch = Callable[[Tensor, Tensor, float, bool, Tensor | None], None]


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Inside, each attention first calls `watch`, for telemetry. Document masks are booleans and sdpa runs."""
    global _watch
    _watch = watch
    try:
        yield
    finally:
        _watch = None


def choose(attention: str, device: torch.device, d_head: int, dtype: torch.dtype) -> None:
    """Sets `kernels.attention=` for this process, for heads of size d_head in `dtype` on `device`. Raises ValueError
    for an unknown choice, and where no kernel of that choice runs."""
    global _choice, _flash
    if attention not in CHOICES:
        raise ValueError(f"kernels.attention={attention}: allowed are {', '.join(CHOICES)}")
    found = None
    if attention == "flash_attn":
        try:
            found = flash.find(device, d_head, dtype)
        except NoKernel as error:
            raise ValueError(f"kernels.attention=flash_attn: {error}. Use kernels.attention=auto") from None
    if attention == "flex" and device.type != "cuda":
        raise ValueError("kernels.attention=flex: it has no backward pass on CPUs. Use kernels.attention=auto")
    _choice, _flash = attention, found


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Mask = None) -> Tensor:
    """softmax(scale q k^T) v: q `(B, T, H, D)`, k and v `(B, S, H_kv, D)` -> `(B, T, H, D)`, all of one dtype.

    causal: without a mask, query t sees the keys 0 to t, and T = S; ignored with a mask. Raises ValueError for T != S.
    """
    if _watch is not None:
        assert mask is None or isinstance(mask, Tensor)
        _watch(q, k, scale, causal, mask)
        return sdpa(q, k, v, scale, causal, mask)
    if isinstance(mask, Packed):
        y = mask.kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask.boundaries, mask.longest, scale)
        return y.unflatten(0, q.shape[:2])  # (B T, H, D) -> (B, T, H, D)
    if isinstance(mask, Blocks):
        return flex(q, k, v, scale, mask)
    if mask is None and causal and q.shape[1] != k.shape[1]:
        # With T != S a query sees other keys in one kernel than in another.
        raise ValueError(f"causal attention of {q.shape[1]} queries to {k.shape[1]} keys")
    if dispatch.is_off("attention"):
        _say("the formula written out", "the kernel is switched off")
        return written_out(q, k, v, scale, visible_to(q, k, causal, mask))
    if q.shape[1] == 1 and q.shape[2] != k.shape[2] and mask is not None:
        return of_one_grouped_query(q, k, v, scale, mask)
    if mask is None and _flash is not None:
        _say(f"flash-attn {_flash.version}", "kernels.attention=flash_attn")
        return _flash.dense(q, k, v, scale, causal)
    if mask is None:
        _say("sdpa", f"kernels.attention={_choice}, and rows are whole")
    else:
        _say("sdpa with a boolean mask", "other kernels take none")
    return sdpa(q, k, v, scale, causal, mask)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """torch's scaled_dot_product_attention; shapes as of `attention`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    if mask is None and is_faster_in_fp32(q, k):
        return _SmallHeads.apply(q, k, v, scale, causal).transpose(1, 2)
    causal, grouped = mask is None and causal, q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return y.transpose(1, 2)


def is_faster_in_fp32(q: Tensor, k: Tensor) -> bool:
    """Whether `_SmallHeads` takes q and k, `(B, H, T, D)`, and a backward pass will follow."""
    is_small = on_cpu(q) and q.dtype == torch.bfloat16 and q.shape[-1] < LARGE_HEAD
    return is_small and q.shape[1] == k.shape[1] and torch.is_grad_enabled() and q.requires_grad


class _SmallHeads(torch.autograd.Function):
    """`sdpa` without a mask of q `(B, H, T, D)`, k and v `(B, H, S, D)` in bf16; gradients are computed in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        # lse: log of the sum of exp(scale q k^T), `(B, H, T)` in fp32. 0.0: no dropout.
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse = ctx.saved_tensors
        q, k, v, y = (x.float() for x in saved)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy.float(), q, k, v, y, lse, 0.0, ctx.causal, scale=ctx.scale
        )
        return *(gradient.to(dy.dtype) for gradient in gradients), None, None


def of_one_grouped_query(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """`sdpa` of one query a row, T = 1: the query heads of a group become queries of their one key/value head.

    mask: `(B, 1, 1, S)`. With the heads as they are, kernels that take a mask would repeat the keys and values.
    """
    q = q.squeeze(1).unflatten(1, (k.shape[2], -1)).transpose(1, 2)  # (B, H, D) -> (B, H / H_kv, H_kv, D)
    y = sdpa(q, k, v, scale, causal=False, mask=mask)
    return y.transpose(1, 2).flatten(1, 2).unsqueeze(1)  # (B, 1, H, D)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, drop: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """drop(softmax(scale q k^T)) v as it is written; shapes as of `attention`. It holds B x H x T x S probabilities."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = scale * at_least_fp32(q @ k.mT)  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    p = scores.softmax(-1)
    y = (p if drop is None else drop(p)).to(v.dtype) @ v
    return y.transpose(1, 2)


def visible_to(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """The mask as a boolean; causal attention without a mask gets the lower triangle."""
    if mask is None and causal:
        return torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    return mask


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Mask, p: float, seeds: Tensor
) -> Tensor:
    """dropout(softmax(scale q k^T)) v; shapes as of `attention`. It holds B x H x T x S probabilities.

    mask: a boolean or None. p, seeds `(B,)`: as of `dropout`. An element is a function of row, head, query and key.
    """
    assert mask is None or isinstance(mask, Tensor)
    _say("the formula written out", f"model.attention_dropout={p:g}: no kernel's dropout is a function of the row")
    return written_out(
        q, k, v, scale, visible_to(q, k, causal, mask), lambda probabilities: dropout(probabilities, p, seeds)
    )


# Documents. The model asks for the form of the mask once per forward pass, outside of compiled code.


def varlen_kernel(device: torch.device, d_head: int, dtype: torch.dtype) -> Varlen | None:
    """The kernel for documents laid end to end; None where a mask separates the documents instead."""
    if _watch is not None:
        return None
    kernel, name, why = None, "a boolean mask for documents", f"kernels.attention={_choice}"
    if dispatch.is_off("attention of documents"):
        why = "the kernel for documents is switched off"
    elif _choice == "flex":
        name = "flex_attention for documents"
    elif _flash is not None:
        kernel, name = _flash.varlen, f"flash-attn {_flash.version}'s varlen for documents"
    elif _choice == "auto":
        kernel, name, why = find_varlen(device, d_head, dtype)
    _say(name, why)
    return kernel


@functools.lru_cache
def find_varlen(device: torch.device, d_head: int, dtype: torch.dtype) -> tuple[Varlen | None, str, str]:
    """The varlen kernel of kernels.attention=auto, or None; the name of what runs, and the reason, for the log."""
    try:
        flash.check_suits(device, d_head, dtype, LARGEST_VARLEN_HEAD)
    except NoKernel as error:
        return None, "a boolean mask for documents", f"kernels.attention=auto would take varlen, but {error}"
    try:
        installed = flash.find(device, d_head, dtype)
    except NoKernel as error:
        return torch_varlen, "torch's varlen for documents", f"kernels.attention=auto: {error}"
    return installed.varlen, f"flash-attn {installed.version}'s varlen for documents", "kernels.attention=auto"


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
    """torch's own varlen kernel, as a `Varlen`."""
    from torch.nn.attention.varlen import varlen_attn  # here, because it imports triton

    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and has_enable_gqa() else {}
    causal = (-1, 0)  # tokens seen to the left, -1 for all, and to the right
    y = varlen_attn(q, k, v, boundaries, boundaries, longest, longest, scale=scale, window_size=causal, **grouped)
    assert isinstance(y, Tensor)
    return y


@called_at_tracing
def has_enable_gqa() -> bool:
    """True if torch's varlen_attn has the argument enable_gqa. In torch 2.11 it accepts grouped heads without it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def wants_blocks() -> bool:
    """True if document masks become flex_attention block masks."""
    return _choice == "flex" and _watch is None and not dispatch.is_off("attention of documents")


def blocks(visible: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], B: int, T: int, device: torch.device) -> Blocks:
    """A block mask of `(B, 1, T, T)`, the same for all heads. visible(b, h, t, s), of 0-dim integer tensors: true if
    query t of row b sees key s. h is always 0."""
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled, create_block_mask would allocate the whole (B, T, T) mask.
    create = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return Blocks(create(visible, B, None, T, T, device=device))


def flex(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Blocks) -> Tensor:
    """torch's flex_attention; shapes as of `attention`."""
    from torch.nn.attention.flex_attention import flex_attention

    # A compiled block compiles flex_attention with it. On a CPU, in tests, flex_attention runs uncompiled.
    compile_here = q.is_cuda and not torch.compiler.is_compiling()
    run = _compiled(flex_attention) if compile_here else cast(Callable[..., Any], flex_attention)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    y = run(q, k, v, block_mask=mask.mask, scale=scale, enable_gqa=grouped)
    assert isinstance(y, Tensor)
    return y.transpose(1, 2)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _say(backend: str, why: str) -> None:
    say_once(logging.INFO, f"attention: {backend} ({why})")
