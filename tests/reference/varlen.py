"""What a varlen kernel computes, sequence by sequence (the signature is that of kernels/flash.py)."""

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


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Tensor,
    boundaries_k: Tensor,
    longest: int,
    longest_k: int,
    causal: bool,
    scale: float,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch_attn::_varlen_attn: what torch.nn.attention.varlen.varlen_attn calls."""
    assert causal
    assert torch.equal(boundaries, boundaries_k)
    assert longest == longest_k
    lse = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    return varlen(q, k, v, boundaries, longest, scale), lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    boundaries: Tensor,
    boundaries_k: Tensor,
    longest: int,
    longest_k: int,
    causal: bool,
    rng_state: Tensor,
    scale: float,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch_attn::_varlen_attn_backward, with the whole (N, N) square."""
    n, group = len(q), q.shape[1] // k.shape[1]
    sequence = torch.bucketize(torch.arange(n), boundaries[1:], right=True)
    visible = (sequence[:, None] == sequence).tril()
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    dp = torch.einsum("thd,shd->hts", grad, values)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dk, dv = torch.einsum("hts,thd->shd", ds, q), torch.einsum("hts,thd->shd", p, grad)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    dq = torch.einsum("hts,shd->thd", ds, keys)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()  # as torch's are, and as the compiler expects them


def run_torchs_kernel_on_cpus() -> None:
    """varlen_attn has no kernel for CPUs. With these, all that torch puts around its own is run as on a GPU."""
    import torch.nn.attention.varlen  # registers them

    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", _forward)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", _backward)
