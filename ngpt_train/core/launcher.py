"""Who has started this process, and whether it still lives: torchrun or Slurm (which job this is, whether it was
started before), or a process of this program."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import parse_json, read_whole

LOOK_SECONDS = 1.0
# A process that has lost its launcher has this long to end its step and to save.
GRACE_SECONDS = 120.0
NO_NAME = "none"  # torchrun's name for a job without --rdzv-id
END_FILE = "NGPT_TRAIN_END"  # in the environment: torchrun hides the exit codes of its processes from a script
_END = "ngpt_train_end.json"
PR_SET_PDEATHSIG = 1  # of Linux' prctl
# The numbers that a launcher puts into the environment, and which one.
NUMBERS = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "torchrun"),
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "torchrun"),
    "SLURM_RESTART_COUNT": "sbatch",
}


class End(NamedTuple):
    """How a start ended."""

    code: int
    message: str


def this_job(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Identifies this process's job. All starts of the job have the same answer.

    torchrun: the job's name, --rdzv-id. agent: the directory that a torchrun has made for its logs, which it keeps
    when it starts its processes again. slurm, requeued: job and how often Slurm has put it back into its queue.
    """
    return {
        "torchrun": environment.get("TORCHELASTIC_RUN_ID"),
        "agent": _agent(environment),
        "slurm": environment.get("SLURM_JOB_ID"),
        "requeued": int(environment.get("SLURM_RESTART_COUNT", "0")),
    }


def _agent(environment: Mapping[str, str] = os.environ) -> str | None:
    return environment.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")[0] or None


def is_same_job(earlier: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Whether `now` is the job of `earlier`, started again by torchrun or by Slurm. earlier: from run.json, or None.
    Raises DataError where that is damaged."""
    if earlier is None:
        return False
    if not _is_job(earlier):
        raise DataError(
            f"run.json is damaged: its last job is {str(earlier)[:100]}. So whether this job has begun the run cannot "
            "be told. Restore it, or delete the run's directory."
        )
    if now["slurm"] and earlier["slurm"] == now["slurm"] and earlier["requeued"] < now["requeued"]:
        return True
    if now["torchrun"] in (None, NO_NAME):
        return now["agent"] is not None and earlier["agent"] == now["agent"]
    return earlier["torchrun"] == now["torchrun"]


def _is_job(found: Any) -> bool:
    """Whether this is what `this_job` returned for some process."""
    if not isinstance(found, Mapping) or found.keys() != this_job({}).keys():
        return False
    names = [found[name] for name in ("torchrun", "agent", "slurm")]
    return all(name is None or isinstance(name, str) for name in names) and type(found["requeued"]) is int


def nameless_on_many_hosts(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether several torchruns share a job without a name, whose restarts cannot be told from new jobs."""
    return environment.get("TORCHELASTIC_RUN_ID") == NO_NAME and int(environment.get("GROUP_WORLD_SIZE", "1")) > 1


def check_ranks(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError unless the environment has the numbers of a launcher such as torchrun, or none."""
    found = {name: environment.get(name) for name in NUMBERS}
    for name, value in found.items():
        if value is not None and not _is_number(value):
            problem = f"{name}={value[:40]}: the environment has it, and it is no number"
            raise ConfigError(f"{problem}\n  Start with {NUMBERS[name]}, which sets it, or unset {name}")
    rank, size = found["RANK"], found["WORLD_SIZE"]
    if size is not None and int(size) > 1 and rank is None:
        problem = f"WORLD_SIZE={size} is set in the environment, but not RANK; torchrun sets both"
        raise ConfigError(f"{problem}\n  Start it with torchrun, or unset WORLD_SIZE")
    if size is not None and rank is not None and int(rank) >= int(size):
        problem = f"RANK={rank}, WORLD_SIZE={size} in the environment: ranks are smaller than their number"
        raise ConfigError(f"{problem}\n  Start with torchrun, which sets both, or unset both")


def check_address(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError unless the environment says where the ranks meet."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not address or not _is_number(port) or not 0 < int(port) < 1 << 16:
        problem = f"MASTER_ADDR={address[:200]}, MASTER_PORT={port[:40]} in the environment: no address and port"
        raise ConfigError(f"{problem}\n  Start with torchrun, which sets both, or unset RANK and WORLD_SIZE")


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) < 10


def remember_end(code: int, message: str) -> None:
    """Notes for the restarts by this torchrun that the job has ended with an exit code that would come again; and for
    the script that has started torchrun, in the file that NGPT_TRAIN_END names."""
    agent = _agent()
    for path in (agent and Path(agent, _END), os.environ.get(END_FILE)):
        if path:
            with contextlib.suppress(OSError):  # then a restart fails as this start has
                Path(path).write_text(json.dumps({"code": code, "message": message}, indent=2) + "\n")


def remembered_end() -> End | None:
    """The end of an earlier start by this torchrun, if it would only come again; else None."""
    agent = _agent()
    if agent is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    try:
        end = parse_json(read_whole(Path(agent, _END)))
        return End(int(end["code"]), str(end["message"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def end_with_launcher() -> None:
    """Makes this process, if torchrun has started it, end after its parent: by SIGTERM, which a trainer takes as the
    request to save and stop, and after GRACE_SECONDS whatever it does."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank}: its launcher (process {parent}) has ended, so it stops too", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def die_with_parent() -> None:
    """Has Linux kill this process, a stopped one too, as soon as the thread that has started it ends."""
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """Ends this process, which `multiprocessing` has started, as soon as its parent process has ended, whatever this
    process is doing; on Linux also where it is stopped."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with_parent()
    if os.getppid() != parent.pid:  # it has ended before the request
        os._exit(1)

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
