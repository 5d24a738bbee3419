"""Runs Weights & Biases in a process beside the training process; wandb_sink.py starts it.

Standard input: a line with the job as JSON, and at the end of the run a line with the reason as JSON. If the input ends
without that line, the training process has died. Standard output: `started ...` once wandb runs, or `failed ...` before
the exit. All else that is printed here goes to the log file.
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
# The x axes of losses, by their names in train and eval records.
AXES = ("tokens", "step", "flops", "train_seconds")
# The run's summary has these numbers of the last record of each kind as final/KIND_NAME, also at other contexts.
FINAL = {"train": ("loss_mean",), "eval": ("loss", "ppl", "bits_per_byte"), "tasks": ("mean", "mean_acc_norm")}


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends this process, with its stack in the log, if the body of the `with` takes longer than `seconds`. After an
    exception the clock keeps running, so that it also bounds the exit that follows."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def start(job: dict[str, Any]) -> Any:
    """Starts and returns the wandb run of the job. wandb raises an error without a key or a server."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb must not report failures by itself
    import wandb

    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,  # it would upload the command line, where an override may hold a secret
        x_stats_pid=job["trainer_pid"],
        init_timeout=job["start_timeout"],
    )
    shown = {name: job[name] for name in ("id", "name", "group", "tags", "notes", "project", "entity", "config")}
    run = wandb.init(
        mode="online" if job["online"] else "offline", resume="allow", dir=job["run_dir"], settings=settings, **shown
    )
    # Records are logged without a wandb step, because wandb drops steps below its last one, as after a resume. The x
    # axis is tokens; a panel may take any other of AXES, which every record has.
    for axis in AXES:
        run.define_metric(axis)
    run.define_metric("*", step_metric="tokens")
    run.summary.update(job["summary"])
    return run


def hand_over(lines: IO[bytes], run: Any) -> dict[str, float]:
    """Logs the complete lines from the file's position on, and leaves the position after them. Returns the last losses
    among them, for the run's summary."""
    final: dict[str, float] = {}
    while True:
        position = lines.tell()
        line = lines.readline()
        if not line.endswith(b"\n"):
            lines.seek(position)
            return final
        record = json.loads(line)
        kind = record.pop("kind")
        axes = {name: record.pop(name) for name in AXES if name in record}
        metrics = {f"{kind}/{name}": value for name, value in record.items()}
        run.log({name: value for name, value in {**axes, **metrics}.items() if value is not None})
        losses = {name: value for name, value in record.items() if name.partition("_ctx")[0] in FINAL.get(kind, ())}
        final |= {f"final/{kind}_{name}": value for name, value in losses.items() if value is not None}


def follow(job: dict[str, Any], run: Any, control: IO[bytes]) -> None:
    """Logs new records, and alerts from the control input, until the input brings the reason of the end or is closed.
    Then finishes the wandb run."""
    with open(job["metrics"], "rb") as lines:
        lines.seek(job["offset"])
        reason: Any = None
        final: dict[str, float] = {}
        while reason is None:
            # The training process writes the last record before it sends the reason, so this reads all of them.
            told = control.readline() if select.select([control], [], [], POLL_SECONDS)[0] else None
            with at_most(job["finish_timeout"]):
                final |= hand_over(lines, run)
                message = json.loads(told) if told else told
                if isinstance(message, dict):
                    run.alert(title="ngpt-train", text=message["alert"], level="ERROR")
                else:
                    reason = message
    faulthandler.dump_traceback_later(job["finish_timeout"], exit=True)  # never cancelled, for wandb's exit hooks
    for name, value in final.items():
        run.summary[name] = value
    run.summary["end"] = reason or "the training process died"
    run.finish(exit_code=0 if reason else 1)


def main() -> None:
    # The original standard output is the channel to the training process. Prints of wandb and its children go to the
    # log.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    control = os.fdopen(os.dup(0), "rb", buffering=0)  # unbuffered, so that select sees all unread input
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    job = json.loads(control.readline())
    try:
        with at_most(job["start_timeout"]):
            run = start(job)
        print("started", run.url if job["online"] else "", file=channel, flush=True)
        follow(job, run, control)
    except BaseException as error:
        if not type(error).__module__.startswith("wandb"):  # its own errors, such as no key, say all in a sentence
            traceback.print_exc()
        reason = (str(error).strip().splitlines() or [""])[0]
        print("failed", f"{type(error).__name__}: {reason}", file=channel, flush=True)
        os._exit(1)  # wandb's exit hooks may wait for a server


if __name__ == "__main__":
    main()
