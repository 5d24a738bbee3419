"""The training process's side of Weights & Biases.

wandb runs in another process, the follower (wandb_follower.py), which reads `metrics.jsonl` as it grows. The training
process starts the follower, checks once per record that it still runs, and at the end waits a bounded time for it. So
wandb cannot delay or stop a run, even if it fails, hangs, crashes or is not installed. The follower has no terminal, so
wandb cannot ask for a key.

A thread would not do: wandb's exit hook waits for a server in the main thread after the end of the run, and only the
end of the process ends that wait (test_a_failing_or_hanging_wandb_stops_nothing, exit:hang).
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngpt_train.config.sections.records import WandbConfig
from ngpt_train.core.recorded import ALARM, Sink
from ngpt_train.core.secrets import redacted

PROJECT = "ngpt-train"
OFFLINE_START_SECONDS = 30.0  # without the network, only a broken installation or disk takes this long


class WandbSink(Sink):
    """Starts a follower, which logs new lines of run_dir/metrics.jsonl to wandb.

    shown: the run's config and summary; secrets in them, and in the settings, are redacted. online: True if wandb talks
    to its server. say: takes one line for people. All files are below run_dir; wandb's prints, and its traceback if it
    fails, are in logs/wandb.log.
    """

    def __init__(
        self, settings: WandbConfig, online: bool, run_dir: Path, shown: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._timeout = settings.timeout
        self._log_path = run_dir / "logs" / "wandb.log"
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._sync_command = f"wandb sync {run_dir}/wandb/*run-*"
        named = {name: getattr(settings, name) for name in ("group", "tags", "notes", "entity")}
        named |= {"name": settings.name or run_dir.name, "project": settings.project or PROJECT}
        metrics = run_dir / "metrics.jsonl"
        self._job = {
            **redacted(named | shown),
            "id": _run_id(run_dir),
            "run_dir": str(run_dir),
            "trainer_pid": os.getpid(),
            "metrics": str(metrics),
            "offset": metrics.stat().st_size,
            "finish_timeout": settings.timeout,
        }
        self._end: str | None = None
        self._start(online)

    def _start(self, online: bool, why_offline: str = "") -> None:
        self._online = online
        self._why_offline = why_offline
        self._started = False
        self._failure = ""
        with self._log_path.open("ab") as log:
            # In a session of its own the follower gets neither Ctrl-C nor torchrun's signals, which would end it before
            # it has read all records.
            self._process: Any = subprocess.Popen(  # None once it has ended
                [sys.executable, "-m", "ngpt_train.observe.wandb_follower"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        start_timeout = self._timeout if online else OFFLINE_START_SECONDS
        self._send(json.dumps({**self._job, "online": online, "start_timeout": start_timeout}, default=str))

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the follower has ended, which _check_follower will report
            self._process.stdin.write(line.encode() + b"\n")

    def _check_follower(self) -> None:
        """Passes on the follower's messages. If it has ended too early, starts an offline follower or gives up."""
        if self._process is None:
            return
        status = self._process.poll()  # before the read, so that the last messages are not missed
        for line in (self._process.stdout.read() or b"").decode(errors="replace").splitlines():
            kind, _, text = line.partition(" ")
            if kind == "failed":
                self._failure = text
            else:
                self._started = True
                why = f" ({self._why_offline})" if self._why_offline else ""
                offline = f"offline{why}; upload with `{self._sync_command}`"
                self._say(f"wandb: {f'online, {text}' if self._online else offline}")
        if status is None:
            return
        self._release()
        if status == 0:
            return
        if self._started:
            self._say(
                f"wandb stopped ({self._failure or 'no answer'}); metrics.jsonl has everything, "
                f"`{self._sync_command}` uploads wandb's copy; details in {self._log_path}"
            )
        elif self._online:
            self._start(online=False, why_offline=self._failure or f"no connection within {self._timeout:g} s")
            if self._end is not None:
                self._send(self._end)
        else:
            self._say(
                f"wandb is off ({self._failure or 'it does not start'}); metrics.jsonl has everything; "
                f"details in {self._log_path}"
            )

    def _release(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    def log(self, record: dict[str, Any]) -> None:
        self._check_follower()  # the follower reads the record from the file

    def message(self, text: str) -> None:
        """Makes an alert of an alarm."""
        if text.startswith(ALARM) and self._process is not None:
            self._send(json.dumps({"alert": redacted(text.removeprefix(ALARM))}))

    def close(self, reason: str) -> None:
        """Waits until the follower has logged the rest: at most two timeouts and an offline start."""
        self._end = json.dumps(redacted(reason))
        self._check_follower()
        if self._process is not None:
            self._send(self._end)
        deadline = time.monotonic() + 2 * self._timeout + OFFLINE_START_SECONDS
        while self._process is not None and time.monotonic() < deadline:
            self._check_follower()
            time.sleep(0.02)
        if self._process is not None:  # it bounds its own time, so only a suspended process is left here
            self._process.kill()
            self._process.wait()
            self._release()
            self._say(f"wandb did not finish; `{self._sync_command}` uploads wandb's copy; details in {self._log_path}")


def _run_id(run_dir: Path) -> str:
    """The wandb id of this run directory, kept in a file, so that a resume continues the same wandb run."""
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()
