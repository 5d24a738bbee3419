"""Several documents in one row: positions that begin anew with each, and attention that ends with it.

doc_ids `(B, T)` name the document of each token: they do not decrease along a row, and -1 is padding. Padding is
treated as one document more, so that what it computes is finite; nothing else sees it.

Attention takes a `Mask`: what a varlen kernel of GPUs needs to know, or where there is none a boolean mask or blocks
that say the same (kernels/attention.py). All of this is computed once per forward pass, on the device, and the host
waits for none of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.kernels.attention import Blocks, Mask, Packed, blocks, varlen_kernel, wants_blocks
from ngpt_train.kernels.flash import Varlen


def starts(doc_ids: Tensor) -> Tensor:
    """`(B, T)`, true where a document begins."""
    first = torch.ones_like(doc_ids[:, :1], dtype=torch.bool)
    return torch.cat([first, doc_ids[:, 1:] != doc_ids[:, :-1]], dim=1)


def positions_in_documents(doc_ids: Tensor) -> Tensor:
    """`(B, T)`: 0, 1, 2, ... in each document."""
    place = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    return place - torch.where(starts(doc_ids), place, 0).cummax(dim=1).values


def document_mask(doc_ids: Tensor, d_head: int, dtype: torch.dtype) -> Mask:
    """Each token sees itself and what comes before it in its document; d_head and dtype of the q, k and v to come."""
    kernel = varlen_kernel(doc_ids.device, d_head, dtype)
    if kernel is not None:
        return packed(doc_ids, kernel)
    return document_blocks(doc_ids) if wants_blocks() else causal_document_mask(doc_ids)


def causal_document_mask(doc_ids: Tensor) -> Tensor:
    """`(B, 1, T, T)`, true where query t may see key s: s <= t and both of one document."""
    T = doc_ids.shape[1]
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same & torch.ones(T, T, dtype=torch.bool, device=doc_ids.device).tril()


def document_blocks(doc_ids: Tensor) -> Blocks:
    """As `causal_document_mask`, without its `(T, T)`."""

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & (doc_ids[b, t] == doc_ids[b, s])

    B, T = doc_ids.shape
    return blocks(visible, B, T, doc_ids.device)


def packed(doc_ids: Tensor, kernel: Varlen) -> Packed:
    """The host does not know how many documents there are, so there is room for a fixed number of them. Rows may share
    it, but no batch may need more; `check_documents` says so on the host before."""
    B, T = doc_ids.shape
    room = room_for_documents(B, T)
    place = torch.arange(B * T, device=doc_ids.device)
    boundaries = torch.where(starts(doc_ids).flatten(), place, B * T).sort().values
    boundaries = F.pad(boundaries, (0, 1), value=B * T)[: room + 1]
    torch._assert_async(boundaries[-1] == B * T, f"more than {room} documents in a batch of {B} rows of {T} tokens")
    return Packed(kernel, boundaries.to(torch.int32), longest=T)


def room_for_documents(B: int, T: int) -> int:
    """In a batch of varlen attention: 64 a row, or one for each 32 tokens. More would cost what varlen is to save: a
    kernel starts threads, and has memory in its backward pass, for each sequence, be it empty."""
    return B * min(T, max(64, T // 32))


def check_documents(doc_ids: Tensor, device: torch.device, d_head: int, dtype: torch.dtype) -> None:
    """Raises ValueError where attention on `device` has no room for so many documents, which only varlen kernels may
    lack. doc_ids: on the CPU; d_head and dtype of the q, k and v to come."""
    if varlen_kernel(device, d_head, dtype) is not None:
        check_room(doc_ids)


def check_room(doc_ids: Tensor) -> None:
    """Raises ValueError where there are more documents than `packed` has room for. doc_ids: on the CPU."""
    B, T = doc_ids.shape
    found, room = int(starts(doc_ids).sum()), room_for_documents(B, T)
    if found > room:
        raise ValueError(
            f"data.document_mask=true: a batch of {B} rows of {T} tokens holds {found} documents, and the GPU's "
            f"kernels have room for {room}. Join the short documents, or set data.document_mask=false, or "
            "kernels.attention=sdpa, which is slower and takes any number"
        )
