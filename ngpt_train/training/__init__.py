"""The training state, one training step, the loop over steps, checkpoints, and the directory of a run.

state = build_state(config)
result = train_step(state, [(tokens, targets), ...])
"""

from ngpt_train.training.state import TrainState, build_state, check_kernels
from ngpt_train.training.step import StepResult, train_step

__all__ = ["StepResult", "TrainState", "build_state", "check_kernels", "train_step"]
