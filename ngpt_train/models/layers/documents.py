"""Several documents in one row: positions that begin anew with each, and attention that ends with it.

doc_ids `(B, T)` name the document of each token: they do not decrease along a row, and -1 is padding. Padding is
treated as one document more, so that what it computes is finite; nothing else sees it.

Attention takes a `Mask`. GPUs have kernels for sequences of any length laid end to end (varlen), which do no work for
pairs of tokens in two documents; elsewhere a boolean mask says the same. All of this is computed once per forward
pass, on the device, and the host waits for none of it.
"""

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Varlen(Protocol):
    """Causal softmax(scale q k^T) v within each sequence: q `(N, H, D)`, k, v `(N, H_kv, D)` -> `(N, H, D)`.

    Sequence i is the tokens from boundaries[i] to boundaries[i + 1], none where both are the same; `longest` is at
    least the length of each.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor: ...


class Packed(NamedTuple):
    """The rows of a batch laid end to end, cut into documents."""

    kernel: Varlen
    boundaries: Tensor  # int32, where documents begin and the last one ends; then that end again, to a fixed length
    longest: int

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.kernel(q, k, v, self.boundaries, self.longest, scale)


# Which keys a query sees: those where a boolean tensor that broadcasts to (B, H, T, S) is true; those before it in its
# document; None: all, or those before it where the attention is causal.
Mask = Tensor | Packed | None


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
    return causal_document_mask(doc_ids) if kernel is None else packed(doc_ids, kernel)


def causal_document_mask(doc_ids: Tensor) -> Tensor:
    """`(B, 1, T, T)`, true where query t may see key s: s <= t and both of one document."""
    T = doc_ids.shape[1]
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same & torch.ones(T, T, dtype=torch.bool, device=doc_ids.device).tril()


def packed(doc_ids: Tensor, kernel: Varlen) -> Packed:
    """The host does not know how many documents there are, so there is room for a fixed number of them. Rows may share
    it, but no batch may need more; `check_room` says so on the host before."""
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


def check_room(doc_ids: Tensor) -> None:
    """Raises ValueError where there are more documents than `packed` has room for. doc_ids: on the CPU."""
    B, T = doc_ids.shape
    found, room = int(starts(doc_ids).sum()), room_for_documents(B, T)
    if found > room:
        raise ValueError(
            f"data.document_mask=true: a batch of {B} rows of {T} tokens holds {found} documents, and the GPU's "
            f"kernels have room for {room}. Join the short documents, or set data.document_mask=false"
        )


@lru_cache
def varlen_kernel(device: torch.device, d_head: int, dtype: torch.dtype) -> Varlen | None:
    """flash-attn's kernel if the package is installed, else torch's own; None where neither runs.

    They are for half precision on GPUs since Ampere. Heads above 192 have no backward pass on some of those.
    """
    suits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and d_head % 8 == 0 and d_head <= 192
    if not suits or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return torch_varlen
    return flash_varlen


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # here, because it imports triton

    # torch 2.11 does not have the word, and takes grouped heads without it.
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    causal = (-1, 0)  # how far it sees to the left, where -1 is all the way, and to the right
    y = varlen_attn(q, k, v, boundaries, boundaries, longest, longest, scale=scale, window_size=causal, **grouped)
    assert isinstance(y, Tensor)
    return y


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, boundaries, boundaries, longest, longest, softmax_scale=scale, causal=True)
