"""Weights & Biases in a process of its own: that process, started by wandb_sink.py.

Standard input: one line with the job as JSON, later one with the reason of the end; the end of the input
without it means that the training process died. Standard output: `started ...` once wandb runs, or
`failed ...` before the exit. Everything else that is printed here goes to the log file.
"""

import contextlib
import faulthandler
import json
import os
import select
import traceback
from collections.abc import Iterator
from typing import IO, Any

POLL_SECONDS = 1.0


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends this process, with its stack in the log, if the body takes longer than `seconds`, wherever it hangs.

    After an exception the time goes on running, so that the exit that follows is bounded too.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def start(job: dict[str, Any]) -> Any:
    """The wandb run of the job; without a key or a server wandb raises."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a failure here is the user's to report
    import wandb

    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,  # the command line, where an override may hold a secret
        x_stats_pid=job["trainer_pid"],
        init_timeout=job["start_timeout"],
    )
    run = wandb.init(
        mode="online" if job["online"] else "offline",
        id=job["id"],
        resume="allow",
        name=job["name"],
        project=job["project"],
        entity=job["entity"],
        dir=job["run_dir"],
        config=job["config"],
        settings=settings,
    )
    # Records carry no wandb step: wandb drops those below one that it has, as after a resume. The x axis is tokens.
    run.define_metric("*", step_metric="tokens")
    return run


def hand_over(lines: IO[bytes], run: Any) -> None:
    """Logs the complete lines from the file's position on."""
    while True:
        position = lines.tell()
        line = lines.readline()
        if not line.endswith(b"\n"):
            lines.seek(position)
            return
        record = json.loads(line)
        kind, step, tokens = record.pop("kind"), record.pop("step"), record.pop("tokens")
        values = {f"{kind}/{name}": value for name, value in record.items() if value is not None}
        run.log({"tokens": tokens, "step": step, **values})


def follow(job: dict[str, Any], run: Any, control: IO[bytes]) -> None:
    """Hands over records until the control input has news, then finishes the run."""
    with open(job["metrics"], "rb") as lines:
        lines.seek(job["offset"])
        ended = False
        while not ended:
            # The last record is written before the end is told: what is read after it is everything.
            ended = bool(select.select([control], [], [], POLL_SECONDS)[0])
            with at_most(job["finish_timeout"]):
                hand_over(lines, run)
    reason = control.readline()
    faulthandler.dump_traceback_later(job["finish_timeout"], exit=True)  # until the exit: wandb has hooks there
    run.summary["end"] = json.loads(reason) if reason else "the training process died"
    run.finish(exit_code=0 if reason else 1)


def main() -> None:
    # Standard output is the channel to the training process; wandb and its children print to the log.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    control = os.fdopen(os.dup(0), "rb", buffering=0)  # unbuffered, so that select sees what is left
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    job = json.loads(control.readline())
    try:
        with at_most(job["start_timeout"]):
            run = start(job)
        print("started", run.url if job["online"] else "", file=channel, flush=True)
        follow(job, run, control)
    except BaseException as error:
        traceback.print_exc()
        reason = (str(error).strip().splitlines() or [""])[0]
        print("failed", f"{type(error).__name__}: {reason}", file=channel, flush=True)
        os._exit(1)  # wandb's exit hooks may wait for a server


if __name__ == "__main__":
    main()
