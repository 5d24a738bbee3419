"""The loss by context and by position, on whole documents: figure 13 of the nGPT paper."""

from ngpt_train.evaluation.length.curves import Curve, measure
from ngpt_train.evaluation.length.figure import plot_lengths

__all__ = ["Curve", "measure", "plot_lengths"]
