"""Keeps findings on disk, so that the next start need not check again. The key has everything that may change them."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import torch

import ngpt_train
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_json
from ngpt_train.kernels.check.calls import Call
from ngpt_train.kernels.check.children import Finding, Request, as_json
from ngpt_train.kernels.dispatch import interpreted

logger = logging.getLogger(__name__)


def machine(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions and code: findings hold for these alone."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else None,
        "driver": driver() if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "interpreted": interpreted(),
        "commit": git_commit(),
        "sources": sources(),
    }


def sources() -> str:
    """A hash of all files of ngpt_train/kernels, because a commit does not know of edits."""
    room = Path(ngpt_train.__file__).parent / "kernels"
    content = hashlib.sha256()
    for path in sorted(room.rglob("*.py")):
        content.update(f"{path.relative_to(room)}\n".encode() + path.read_bytes())
    return content.hexdigest()[:16]


def triton_version() -> str | None:
    from importlib import metadata

    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def driver() -> str | None:
    """The driver's version; None if it is unknown."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Kept:
    """The findings in `directory` for this machine and request; a file for each call."""

    def __init__(self, directory: Path, device: torch.device, request: Request) -> None:
        self.key = {"machine": machine(device), "compiled": request.compiled, "attention": request.attention}
        self.times = request.times
        self.directory = directory / _hash(self.key)

    def get(self, call: Call) -> Finding | None:
        """The finding of an earlier check. None without a check, and if times are asked for and it has none."""
        path = self._path(call)
        if not path.exists():
            return None
        try:
            stored = read_json(path)
            found = Finding(**{"problem": None} | stored["finding"])
        except (DataError, TypeError, KeyError) as error:
            logger.warning("%s is left out: %s", path, error)
            return None
        timed = found.us is not None or found.untimed is not None or found.problem is not None
        return found if timed or not self.times or not stored["timeable"] else None

    def put(self, call: Call, found: Finding, timeable: bool) -> None:
        """Keeps a lasting finding. A full or read-only disk is a warning."""
        if not found.lasting:
            return
        content = {**self.key, "call": call.json(), "timeable": timeable, "finding": as_json(found)}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self._path(call), content)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.directory, error.strerror)

    def _path(self, call: Call) -> Path:
        return self.directory / f"{call.kernel.replace(' ', '_')}-{_hash(call.json())}.json"


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
