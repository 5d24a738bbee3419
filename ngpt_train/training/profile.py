"""A torch profiler trace of a few steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, schedule

from ngpt_train.distributed import World


@contextmanager
def profiled(enabled: bool, directory: Path, world: World) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step; the trace of steps 4 to 6 goes to `directory/rank_<r>.json`.

    Perfetto and chrome://tracing open the trace. It leaves out the first steps, which compile and warm up.
    """
    if not enabled:
        yield lambda: None
        return

    def write(profiler: profile) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(directory / f"rank_{world.rank}.json"))

    with profile(schedule=schedule(wait=2, warmup=1, active=3, repeat=1), on_trace_ready=write) as profiler:
        yield profiler.step
