"""Stand-ins for the package flash-attn: the names, orders of arguments and results of its versions, by the formula."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.varlen import varlen

GPU = torch.device("cuda", 0)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """q (B, T, H, D), k and v (B, S, H_kv, D) -> (B, T, H, D); visible broadcasts to (B, H, T, S)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = (torch.einsum("bthd,bshd->bhts", q, k) * scale).masked_fill(~visible, -math.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdim=True), v)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """As the package: the last query sees the last key, and without a scale it is 1 / sqrt(D)."""
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    visible = visible.tril(k.shape[1] - q.shape[1]) if causal else visible
    return softmax_attention(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, visible)


def _varlen(q: Tensor, k: Tensor, v: Tensor, starts: Any, longest: Any, scale: float | None, causal: bool) -> Tensor:
    assert causal
    assert starts[0] is starts[1]
    assert longest[0] == longest[1]
    assert all(type(x) is int for x in longest)
    return varlen(q, k, v, starts[0], longest[0], q.shape[-1] ** -0.5 if scale is None else scale)


class Version2:
    @staticmethod
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        assert dropout_p == 0
        assert window_size == (-1, -1)
        return _dense(q, k, v, softmax_scale, causal)

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
    ):
        assert dropout_p == 0
        return _varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), softmax_scale, causal)


class Version3:
    @staticmethod
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1)):
        assert qv is None
        assert window_size == (-1, -1)
        return _dense(q, k, v, softmax_scale, causal)

    @staticmethod
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        qv=None,
    ):
        assert seqused_q is seqused_k is qv is None
        return _varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), softmax_scale, causal)


class Version4:
    @staticmethod
    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None)
    ):
        assert qv is gather_kv_indices is None
        assert window_size == (None, None)
        return _dense(q, k, v, softmax_scale, causal), None

    @staticmethod
    def flash_attn_varlen_func(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
    ):
        assert qv is min_seqlen_k is seqused_q is seqused_k is None
        starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return _varlen(q, k, v, starts, longest, softmax_scale, causal), None


class Version3Beta(Version3):
    """As before 3.0: with the logarithms of the sums."""

    @staticmethod
    def flash_attn_func(*args, **kwargs):
        return Version3.flash_attn_func(*args, **kwargs), torch.zeros(1)

    @staticmethod
    def flash_attn_varlen_func(*args, **kwargs):
        return Version3.flash_attn_varlen_func(*args, **kwargs), torch.zeros(1)


NAMES = {"flash_attn": "2", "flash_attn_interface": "3", "flash_attn.cute": "4"}
FUNCTIONS: dict[str, type] = {"2": Version2, "3": Version3, "3 beta": Version3Beta, "4": Version4}


def install(monkeypatch: pytest.MonkeyPatch, *versions: str, capability: tuple[int, int] = (9, 0)) -> None:
    """As if these were installed, and no others, on a machine with such a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    for name, number in NAMES.items():
        version = next((version for version in versions if version.startswith(number)), None)
        module = None
        if version or (name == "flash_attn" and "4" in versions):  # which brings an empty one
            module = ModuleType(name)
        if version:
            vars(module).update({key: getattr(FUNCTIONS[version], key) for key in Version2.__dict__ if "func" in key})
        monkeypatch.setitem(sys.modules, name, module)
