"""The package flash-attn. Its major versions are installed and imported under different names.

    version  import name             GPUs                    returns
    2        flash_attn              since Ampere            y
    3        flash_attn_interface    Hopper                  y; before its first release (y, log-sum-exp)
    4        flash_attn.cute         Hopper and Blackwell    (y, log-sum-exp)

Several versions may be installed side by side. A directory flash_attn does not tell which: version 4 creates one
without the functions of version 2, and some builds of version 2 hold the files of version 4 without their needs. So a
version counts as installed if its functions can be imported. The versions agree in the names of the
arguments, not in their order.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PACKAGES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
# The largest head whose backward pass a version has on every GPU that `by_speed` names it for.
LARGEST_HEAD = {2: 192, 3: 256, 4: 128}
DTYPES = (torch.bfloat16, torch.float16)


class NoKernel(ValueError):
    """No kernel of flash-attn runs here. The message says why, without a full stop at its end."""


# (q, k, v, scale, causal) -> softmax(scale q k^T) v: q `(B, T, H, D)`, k and v `(B, S, H_kv, D)` -> `(B, T, H, D)`;
# causal requires T = S.
Dense = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
# (q, k, v, boundaries, longest, scale) -> causal softmax(scale q k^T) v within each sequence: q `(N, H, D)`, k and v
# `(N, H_kv, D)` -> `(N, H, D)`. Sequence i has the tokens from boundaries[i] to boundaries[i + 1] - 1; it may be empty.
# No sequence is longer than `longest` tokens.
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


class Flash(NamedTuple):
    """One version of flash-attn, with its functions in the form that attention.py calls."""

    version: int
    dense: Dense
    varlen: Varlen


def check_suits(device: torch.device, d_head: int, dtype: torch.dtype, largest_head: int) -> None:
    """Raises NoKernel where the kernels of flash-attn, or torch's copy of them, do not run."""
    if device.type != "cuda":
        raise NoKernel(f"its kernels are for GPUs, and this runs on a {device.type.upper()}")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise NoKernel("its kernels are for GPUs since Ampere, and this one is older")
    if dtype not in DTYPES:
        raise NoKernel(f"it computes in bf16 or fp16, and train.precision asks for {dtype}".replace("torch.", ""))
    if d_head % 8 or d_head > largest_head:
        raise NoKernel(f"it takes heads of a multiple of 8 up to {largest_head}, and these are of {d_head}")


def find(device: torch.device, d_head: int, dtype: torch.dtype) -> Flash:
    """The fastest version, of the installed ones, for this device. Raises NoKernel, with the reason of each version."""
    check_suits(device, d_head, dtype, max(LARGEST_HEAD.values()))
    reasons = []
    for version in by_speed(torch.cuda.get_device_capability(device)):
        try:
            check_suits(device, d_head, dtype, LARGEST_HEAD[version])
            return load(version)
        except (NoKernel, ImportError) as error:
            reasons.append(f"{version}: {error}")
    raise NoKernel(f"no flash-attn for this GPU is installed; the extra [flash] is version 2 ({'; '.join(reasons)})")


def by_speed(capability: tuple[int, int]) -> tuple[int, ...]:
    """The versions with a backward pass on GPUs of this compute capability, the fastest first."""
    if capability < (9, 0):
        return (2,)
    return (3, 4, 2) if capability < (10, 0) else (4, 2)


def load(version: int) -> Flash:
    """Imports a version. Raises ImportError where it is not installed, or not completely."""
    package = importlib.import_module(PACKAGES[version])
    try:
        of_rows, of_sequences = package.flash_attn_func, package.flash_attn_varlen_func
    except AttributeError as error:
        raise ImportError(f"{PACKAGES[version]} is there without its functions: {error}") from None
    if version == 4:  # it generates code when it is called, which torch.compile cannot trace
        of_rows, of_sequences = torch.compiler.disable(of_rows), torch.compiler.disable(of_sequences)

    def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        return _output(of_rows(q, k, v, softmax_scale=scale, causal=causal))

    def varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float) -> Tensor:
        ends = {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
        longest_of = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return _output(of_sequences(q, k, v, **ends, **longest_of, softmax_scale=scale, causal=True))

    return Flash(version, dense, varlen)


def _output(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y
