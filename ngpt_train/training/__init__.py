"""The training state, one step of it, the loop over steps, and what survives a process.

state = build_state(config)
result = train_step(state, [(tokens, targets), ...])
"""

from ngpt_train.training.state import TrainState, build_state
from ngpt_train.training.step import StepResult, train_step

__all__ = ["StepResult", "TrainState", "build_state", "train_step"]
