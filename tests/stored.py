"""A checkpoint of a state, and what one holds, read by safetensors alone."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ngpt_train.training.checkpoint import Checkpoints
from ngpt_train.training.state import TrainState

KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "mean_square", "step", "ema", "statistics")
# The first word of a name; else it is a weight's.


def save_state(checkpoints: Checkpoints, state: TrainState, loss: float | None = None) -> Path:
    """Saves as training does that waits; at the start of the data, without further files."""
    snapshot = checkpoints.snapshot(state, {}, lambda _: None, loss)
    return checkpoints.write(snapshot, checkpoints.world)


def stored_tensors(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """The whole tensors by kind, weights as `model`, and name, put together from the shards of all ranks."""
    pieces: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                pieces.setdefault(name, []).append((places[name]["saved_offsets"], file.get_tensor(name)))
    found: dict[str, dict[str, Tensor]] = {}
    for name, parts in pieces.items():
        rows = [piece for _, piece in sorted(parts, key=lambda part: part[0])]
        kind, _, rest = name.partition(".")
        kind, rest = (kind, rest) if kind in KINDS else ("model", name)
        found.setdefault(kind, {})[rest] = torch.cat(rows) if rows[0].ndim else rows[0]
    return found
