"""What a varlen kernel computes, sequence by sequence (the signature is that of models/layers/documents.py)."""

import torch
from torch import Tensor


def varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
    """q (N, H, d_k), k and v (N, H_kv, d_k) -> (N, H, d_k).

    As on a GPU a sequence is computed as far as `longest` says, and what belongs to none is whatever was there before.
    """
    assert boundaries.dtype == torch.int32
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = torch.full_like(q, torch.nan)
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        end = min(end, start + longest)
        if start == end:
            continue
        scores = torch.einsum("thd,shd->hts", q[start:end], k[start:end]) * scale
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        p = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.cat([out[:start], torch.einsum("hts,shd->thd", p, v[start:end]), out[end:]])
    return out
