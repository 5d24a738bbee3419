"""The origin of a run's numbers: code, versions, machine, data, first weights."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ngpt_train
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import differing_weights, read_yaml
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import DataError
from ngpt_train.distributed.layouts import resolve_kind
from ngpt_train.models.weights import standard_deviations
from ngpt_train.training.checkpoint.catalogue import find_checkpoint
from ngpt_train.training.state import TrainState

if TYPE_CHECKING:
    from ngpt_train.data.dataset import Dataset  # imports numpy


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
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "world_size": state.world.size,
        "parallel": resolve_kind(state.config.parallel.kind, state.world.size, device.type, state.world.local_size),
        "n_params": state.model.n_params(),
        "init": standard_deviations(state.model),
        "data_fingerprint": data.fingerprint,
        "tokenizer": data.tokenizer.name,
        "tokenizer_fingerprint": data.tokenizer.fingerprint,
    }


def processor() -> str:
    """Names the processor and its instructions in use by torch: sums on another processor are rounded otherwise."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def initial_checkpoint(config: Config) -> Path | None:
    """The checkpoint of run.init_from, if that is set. Raises DataError unless it has the config's model."""
    if config.run.init_from is None:
        return None
    checkpoint = find_checkpoint("run.init_from", config.run.init_from)
    stored = read_yaml(checkpoint / "config.yaml").model
    if differing := differing_weights(stored, config.model):
        raise DataError(
            f"run.init_from={config.run.init_from}: the weights are of another model.\n  " + "\n  ".join(differing)
        )
    return checkpoint
