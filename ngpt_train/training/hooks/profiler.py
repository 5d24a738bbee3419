"""A torch profiler trace of a few steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, schedule

from ngpt_train.training.hooks.hook import Hook, TrainingRun


class Profiler(Hook):
    """Writes the trace of steps 4 to 6 of this start to `directory/rank_<r>.json`.

    Perfetto and chrome://tracing open the trace. It leaves out the first steps, which compile and warm up.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def around(self, run: TrainingRun) -> Iterator[None]:
        def write(profiler: profile) -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._directory / f"rank_{run.state.world.rank}.json"))

        steps = schedule(wait=2, warmup=1, active=3, repeat=1)
        with profile(schedule=steps, on_trace_ready=write) as self._profile:
            yield

    def after_step(self, run: TrainingRun) -> None:
        self._profile.step()
