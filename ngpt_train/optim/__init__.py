"""Optimizer and learning rate schedule."""

from ngpt_train.optim.optimizer import build_optimizer
from ngpt_train.optim.schedule import lr_at

__all__ = ["build_optimizer", "lr_at"]
