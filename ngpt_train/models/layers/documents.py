"""Several documents in one row: each has positions from 0 on, and a token attends only to its own document.

doc_ids `(B, T)` name the document of each token. They do not decrease along a row, except for padding, which is -1.
Padding counts as one more document, so that its activations are finite; no other token sees it.

Attention takes a `Mask` (kernels/attention.py): the boundaries of documents for a varlen kernel of GPUs, or else a
boolean mask or flex_attention's blocks. It is computed once per forward pass, without a wait of the host.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.kernels.attention import Blocks, Mask, Packed, blocks, varlen_kernel, wants_blocks
from ngpt_train.kernels.flash import Varlen


def starts(doc_ids: Tensor) -> Tensor:
    """`(B, T)` bool: true at the first token of each document."""
    first = torch.ones_like(doc_ids[:, :1], dtype=torch.bool)
    return torch.cat([first, doc_ids[:, 1:] != doc_ids[:, :-1]], dim=1)


def positions_in_documents(doc_ids: Tensor) -> Tensor:
    """Positions `(B, T)` int64 of the tokens in their documents: 0, 1, 2, ... in each."""
    place = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    return place - torch.where(starts(doc_ids), place, 0).cummax(dim=1).values


def document_mask(doc_ids: Tensor, d_head: int, dtype: torch.dtype, causal: bool = True) -> Mask:
    """The mask: each token sees its document, if causal up to itself. d_head, dtype: of q, k and v."""
    kernel = varlen_kernel(doc_ids.device, d_head, dtype) if causal else None
    if kernel is not None:
        return packed(doc_ids, kernel)
    return document_blocks(doc_ids, causal) if wants_blocks() else boolean_mask(doc_ids, causal)


def boolean_mask(doc_ids: Tensor, causal: bool = True) -> Tensor:
    """`(B, 1, T, T)` bool: true where query t may see key s: both are in one document and, if causal, s <= t."""
    T = doc_ids.shape[1]
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same & torch.ones(T, T, dtype=torch.bool, device=doc_ids.device).tril() if causal else same


def document_blocks(doc_ids: Tensor, causal: bool = True) -> Blocks:
    """The mask of `boolean_mask` as blocks, without a tensor of T x T elements."""

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        same = doc_ids[b, t] == doc_ids[b, s]
        return same & (s <= t) if causal else same

    B, T = doc_ids.shape
    return blocks(visible, B, T, doc_ids.device)


def packed(doc_ids: Tensor, kernel: Varlen) -> Packed:
    """The boundaries of documents for a varlen kernel. The host does not know the number of documents, so the tensor of
    boundaries has room for a fixed number per batch. `check_documents` refuses a batch with more before it fails."""
    B, T = doc_ids.shape
    room = room_for_documents(B, T)
    place = torch.arange(B * T, device=doc_ids.device)
    boundaries = torch.where(starts(doc_ids).flatten(), place, B * T).sort().values
    boundaries = F.pad(boundaries, (0, 1), value=B * T)[: room + 1]
    torch._assert_async(boundaries[-1] == B * T, f"more than {room} documents in a batch of {B} rows of {T} tokens")
    return Packed(kernel, boundaries.to(torch.int32), longest=T)


def room_for_documents(B: int, T: int) -> int:
    """The most documents in a batch of B rows for varlen attention: per row 64, or T / 32 if that is more, at most T.
    More room would cost what varlen saves: for each sequence, even an empty one, a kernel starts threads and its
    backward pass takes memory."""
    return B * min(T, max(64, T // 32))


def check_documents(doc_ids: Tensor, device: torch.device, d_head: int, dtype: torch.dtype) -> None:
    """Raises ValueError if a varlen kernel runs on `device`, and a batch has more documents than `packed` has room for.
    Other kinds of attention take any number. doc_ids: on the CPU. d_head, dtype: of q, k and v."""
    if varlen_kernel(device, d_head, dtype) is None:
        return
    B, T = doc_ids.shape
    found, room = int(starts(doc_ids).sum()), room_for_documents(B, T)
    if found > room:
        raise ValueError(
            f"data.document_mask=true: a batch of {B} rows of {T} tokens holds {found} documents, and the GPU's "
            f"kernels have room for {room}. Join the short documents, or set data.document_mask=false, or "
            "kernels.attention=sdpa, which is slower and takes any number"
        )
