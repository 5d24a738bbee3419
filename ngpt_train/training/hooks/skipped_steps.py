"""Ends a run once its gradients stay infinite or NaN."""

from collections.abc import Callable

from ngpt_train.core.errors import told_by_rank_0
from ngpt_train.training.guards import MAX_SKIPPED_IN_A_ROW, NumericalError
from ngpt_train.training.hooks.hook import Hook, TrainingRun


class SkippedSteps(Hook):
    """Raises NumericalError after MAX_SKIPPED_IN_A_ROW skipped steps in a row, and after two at the planned end.

    advice: a sentence for the user.
    """

    def __init__(self, advice: Callable[[], str]) -> None:
        self._advice = advice

    def check(self, run: TrainingRun) -> None:
        if not run.rests:
            return
        run.skipped = int(run.state.guards.skipped_in_a_row)
        if run.skipped < MAX_SKIPPED_IN_A_ROW and not (run.skipped > 1 and run.step == run.last):
            return
        in_fp16 = " The loss scale is 1: if fp16 overflows, use another precision." if run.state.loss_scale else ""
        raise told_by_rank_0(
            NumericalError(
                f"{run.skipped} steps in a row, up to step {run.step}, had a gradient that is not finite and were "
                f"skipped. {self._advice()}, or look at the data after step {run.step - run.skipped}.{in_fp16}"
            )
        )
