"""Hooks: everything beside the steps of a run, one hook a file. verbs/train_hooks.py lists them.

The loop calls the hooks at named moments, in the order of their list:

    start                                before the first step
    before_step                          rows are here
        the step
    after_step, check, save, evaluate    until the next one
    finish, close                        in reverse order

A plug-in may add hooks: docs/add_an_architecture.md.
"""

from ngpt_train.core.recorded import Record, Sink
from ngpt_train.training.loop import Hook, TrainingRun, due

__all__ = ["Hook", "Record", "Sink", "TrainingRun", "due"]
