"""`export`: a checkpoint as a directory for other programs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ngpt_train.config.places import check_free
from ngpt_train.config.schema import Config
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.restore import find_trained, restore
from ngpt_train.interop.exporting import export
from ngpt_train.interop.layouts import chosen_layout


def main(config: Config, overrides: Sequence[str]) -> int:
    """Writes the model of export.checkpoint into export.out and prints how it was compared; returns 0.

    Raises ConfigError for an override that contradicts the checkpoint, a layout that cannot hold the model, or a
    directory that is not empty; DataError where there is no usable checkpoint; NumericalError where the written model
    is another one.
    """
    own = config.export
    assert own.out is not None  # check_verb refuses null
    check_free("export.out", Path(own.out).expanduser())
    trained = find_trained("export", config, overrides)
    layout = chosen_layout(own.layout, trained.config.model, own.dtype)
    # In fp32 on the CPU, so that the comparison has one arithmetic and needs no GPU.
    in_fp32 = replace(config, train=replace(config.train, precision="fp32", device="cpu"))
    restored = restore(trained, in_fp32, World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    restored.model.eval()
    out = export(restored, own, layout, print)
    print(f"written to {out}")
    return 0
