"""`python -m tests.processes.save_worker ACTION POINT STEPS RANK train ...`: the trainer, with a fault in its saves.

ACTION, on rank RANK, at POINT of the saves of STEPS (`4` or `4,5,6`; `all`): `kill` the process, `fail` as a full disk
does, `sleep` for two seconds, or `hang`. Nothing happens once torchrun has started the processes again.
"""

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngpt_train.__main__ import run
from ngpt_train.training import TrainState
from ngpt_train.training.checkpoint import save, tensor_files
from ngpt_train.training.checkpoint.catalogue import NAME
from ngpt_train.training.hooks import saving

SLEEP = 2.0  # seconds
POINTS = ["staged", "writing", "written", "checksummed", "before-rename", "after-rename", "pruning"]


def main() -> None:
    action, point, steps, rank = sys.argv[1:5]
    del sys.argv[1:5]
    mine = os.environ.get("RANK", "0") == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    at = {"": 0}  # the step of the save under way

    def reached(here: str) -> None:
        if not mine or here != point or (steps != "all" and str(at[""]) not in steps.split(",")):
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action in ("sleep", "hang"):
            time.sleep(SLEEP if action == "sleep" else 10_000)
        else:
            raise OSError(errno.ENOSPC, "no room, says the test")

    def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            reached(before)
            result = original(*arguments, **named)
            reached(after)
            return result

        setattr(owner, name, wrapped)

    begin = saving.Saves.save

    def begun(self: saving.Saves, state: TrainState, *others: Any) -> None:
        at[""] = state.step
        begin(self, state, *others)
        if mine and action == "fail" and self._thread is not None:
            self._thread.join()  # so that the failure is known in this step, however busy the machine is

    saving.Saves.save = begun  # type: ignore[method-assign]
    around(saving.Staging, "wait", after="staged")
    around(tensor_files, "_bytes", before="writing")  # of the first tensor: the header is written, it is not
    around(save, "write_tensors", after="written")
    around(save, "differences", after="checksummed")
    rename, rmtree = os.rename, shutil.rmtree

    def renamed(source: Path, target: Path) -> None:
        reached("before-rename" if NAME.fullmatch(Path(target).name) else "")
        rename(source, target)
        reached("after-rename" if NAME.fullmatch(Path(target).name) else "")

    def deleted(path: Path, *arguments: Any, **named: Any) -> None:
        if "deleting-" in Path(path).name and mine and point == "pruning":
            next(Path(path).glob("*.safetensors")).unlink()
            reached("pruning")
        rmtree(path, *arguments, **named)

    os.rename, shutil.rmtree = renamed, deleted  # type: ignore[assignment]
    run()


if __name__ == "__main__":
    main()
