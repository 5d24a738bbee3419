"""What a machine has, before anything is measured on it: versions, and what this torch can do."""

from __future__ import annotations

import importlib
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ngpt_train.kernels import dispatch
from ngpt_train.training.provenance import git_commit


def facts(device: torch.device) -> dict[str, Any]:
    """By name, in words or numbers; nothing here raises, because torch's versions differ in what they have."""
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
        "cudnn": tried(torch.backends.cudnn.version),  # raises where it is not the one of torch
        "driver, SM clock, power": driver(),
        "kernels": dispatch.why_no_triton() or "triton",
        **{f"torch has {name}": there_is(*where) for name, where in has.items()},
        "torch has addmm with out_dtype": tried(lambda: product_in_fp32(device)),
        "order of attention's backends": tried(backends_in_order),
    }


def there_is(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except Exception:  # a torch and a triton that do not fit raise anything on import
        return False


def tried(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # what is missing says so in its own way
        return f"no: {type(error).__name__}: {error}".splitlines()[0]


def product_in_fp32(device: torch.device) -> str:
    """Of bf16 factors, added to an fp32 tensor in place: what the gradient of the output embedding is summed by."""
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    found = float(total[0, 0])
    return "yes" if found == 17 else f"no: 1 + 16 is {found}"


def backends_in_order() -> str:
    """As torch tries them for scaled_dot_product_attention."""
    return ", ".join(SDPBackend(number).name for number in torch._C._get_sdp_priority_order())


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """As the driver's own tool says; nothing is set."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
