"""The origin of a run's numbers: code, versions, machine, data."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any

import torch

import ngpt_train
from ngpt_train.core.checkout import git_commit
from ngpt_train.distributed import resolve_kind
from ngpt_train.training.state import TrainState

if TYPE_CHECKING:
    from ngpt_train.data import Dataset  # needs numpy, which the commit does not


def describe_start(state: TrainState, data: Dataset) -> dict[str, Any]:
    """The entry of run.json for one start of a run."""
    device = state.world.device
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": state.step,
        "git_commit": git_commit(),
        "versions": {
            "ngpt_train": ngpt_train.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "world_size": state.world.size,
        "parallel": resolve_kind(state.config.parallel.kind, state.world.size, device.type, state.world.local_size),
        "n_params": state.model.n_params(),
        "data_fingerprint": data.fingerprint,
        "tokenizer": data.tokenizer.name,
        "tokenizer_fingerprint": data.tokenizer.fingerprint,
    }
