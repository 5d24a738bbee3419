"""Optimizer and learning rate schedule."""

from ngpt_train.optim.loss_scale import LossScale
from ngpt_train.optim.moving_average import MovingAverage
from ngpt_train.optim.optimizer import build_optimizer
from ngpt_train.optim.row_adam import RowAdam
from ngpt_train.optim.schedule import lr_at
from ngpt_train.optim.storage import round_to_bf16_

__all__ = ["LossScale", "MovingAverage", "RowAdam", "build_optimizer", "lr_at", "round_to_bf16_"]
