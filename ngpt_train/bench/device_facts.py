"""Versions, the GPU's clock and power, and the features of this torch that the kernels could use."""

from __future__ import annotations

import importlib
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ngpt_train.core.checkout import git_commit
from ngpt_train.kernels import dispatch


def facts(device: torch.device) -> dict[str, Any]:
    """Facts by name, in words or numbers. None of the questions raises, because versions of torch differ."""
    has = {
        "F.linear_cross_entropy": ("torch.nn.functional", "linear_cross_entropy"),
        "varlen_attn": ("torch.nn.attention.varlen", "varlen_attn"),
        "activate_flash_attention_impl": ("torch.nn.attention", "activate_flash_attention_impl"),
    }
    return {
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cudnn": tried(
            torch.backends.cudnn.version
        ),  # raises where the installed cuDNN is not the one that torch was built for
        "driver, SM clock, power": driver(),
        "kernels": dispatch.why_no_triton() or "triton",
        **{f"torch has {name}": there_is(*where) for name, where in has.items()},
        "torch has addmm with out_dtype": tried(lambda: product_in_fp32(device)),
        "order of attention's backends": tried(backends_in_order),
    }


def there_is(module: str, name: str) -> bool:
    """Whether `module` can be imported and has `name`."""
    try:
        return hasattr(importlib.import_module(module), name)
    except Exception:  # a torch and a triton that do not fit raise anything on import
        return False


def tried(question: Callable[[], Any]) -> Any:
    """The answer, or "no: " and the first line of the error."""
    try:
        return question()
    except Exception as error:  # what is missing raises errors of many types
        return f"no: {type(error).__name__}: {error}".splitlines()[0]


def product_in_fp32(device: torch.device) -> str:
    """Whether addmm adds a product of bf16 matrices to an fp32 tensor in place, as the output embedding's gradient is.

    Raises what torch raises where it cannot.
    """
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    found = float(total[0, 0])
    return "yes" if found == 17 else f"no: 1 + 16 is {found}"


def backends_in_order() -> str:
    """The backends of scaled_dot_product_attention in the order in which torch tries them."""
    return ", ".join(SDPBackend(number).name for number in torch._C._get_sdp_priority_order())


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Driver version, SM clock and power limit, as nvidia-smi prints them; None without it. It changes no setting."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
