"""Pretraining of normalized Transformers, and a fair comparison with the ones that are not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ngpt_train.evaluation.restore import Restored

__version__ = "0.1.0"


def load(run: str | Path, device: str = "auto") -> Restored:
    """The model and the tokenizer of a run (its newest checkpoint), of a checkpoint, or of RUN/best.

    device: auto, cpu or cuda. Raises DataError where there is no usable checkpoint, ConfigError where the device cannot
    be used. Nothing heavy is imported before the first call.
    """
    from ngpt_train.evaluation.restore import restore_here

    return restore_here(run, device)
