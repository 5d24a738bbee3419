"""The faults of scripts/chaos.py: what each does to a run that goes on, or to what a killed one has left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STEPS, SAVE_EVERY = 40, 5
HANG_SECONDS = 10
START_SECONDS = 90  # until a run's first step, on a busy machine
END_SECONDS = 120  # until all ranks have ended after a fault that ends them


@dataclass
class Job:
    """One attempt: torchrun and its ranks, in a session of their own."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    directory: Path

    def ranks(self) -> list[int]:
        """Process ids of the ranks, by their number."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(value[5:]): pid for value in values if value.startswith(b"RANK=")}
        return [found[rank] for rank in sorted(found)]

    def wait_until(self, happened: Callable[[], bool]) -> bool:
        """Whether it happened, before the job ended and within START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if happened():
                return True
            time.sleep(0.002)
        return False

    def at_step(self, step: int, delay: float) -> None:
        """Returns so many seconds after the record of this step."""
        self.wait_until(lambda: last_step(self.directory) >= step)
        time.sleep(delay)

    def in_a_save(self, number: int) -> None:
        """Returns while the number-th checkpoint from here on is being written."""
        seen: set[str] = set()

        def writing() -> bool:
            with contextlib.suppress(OSError):
                names = os.listdir(self.directory / "checkpoints")
                seen.update(name for name in names if not name.startswith(("step_", "damaged-")))
            return len(seen) >= number

        self.wait_until(writing)

    def signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_for_end(self, seconds: float) -> bool:
        """Whether torchrun and all its ranks ended within so many seconds; kills them if not."""
        ranks, deadline = self.ranks(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            ranks = list({*ranks, *self.ranks()})
            if self.process.poll() is not None and not any(alive(pid) for pid in ranks):
                return True
            time.sleep(0.02)
        self.signal([self.process.pid, *ranks], signal.SIGKILL)
        self.process.wait()
        return False


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def last_step(directory: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return -1


# Faults while a run goes on. Each gets the job and a source of random numbers, and returns what it did, in words.
Fault = Callable[[Job, random.Random], str]


def moment(job: Job, chance: random.Random) -> str:
    """Waits for a random moment of the run; one in eight lies before the first step."""
    if chance.random() < 1 / 8:
        delay = chance.uniform(0, 8)
        time.sleep(delay)
        return f"{delay:.1f} s after the start"
    step = chance.randint(1, STEPS - 2)
    delay = chance.uniform(0, 0.15)
    job.at_step(step, delay)
    return f"{1000 * delay:.0f} ms after step {step}"


def in_a_save(job: Job, chance: random.Random) -> str:
    """Waits for a random moment of a random save."""
    number = chance.randint(1, STEPS // SAVE_EVERY - 1)
    job.in_a_save(number)
    delay = chance.expovariate(1 / 0.02)
    time.sleep(delay)
    return f"{1000 * delay:.0f} ms into save {number}"


def send(number: signal.Signals, to: str, when: Fault = moment) -> Fault:
    """Sends a signal to torchrun, to one rank, to all ranks, or to everything."""

    def strike(job: Job, chance: random.Random) -> str:
        said, torchrun, ranks = when(job, chance), [job.process.pid], job.ranks()
        one = [chance.choice(ranks)] if ranks else []
        pids = {"torchrun": torchrun, "one rank": one, "all ranks": ranks, "everything": torchrun + ranks}[to]
        job.signal(pids, number)
        return said

    return strike


def stop_one_rank(job: Job, chance: random.Random) -> str:
    job.at_step(chance.randint(1, STEPS - 10), 0)
    if ranks := job.ranks():
        job.signal([chance.choice(ranks)], signal.SIGSTOP)
    return f"for good, after step {last_step(job.directory)}"


def pause_one_rank(job: Job, chance: random.Random) -> str:
    when, ranks, seconds = moment(job, chance), job.ranks(), chance.uniform(0.1, HANG_SECONDS / 3)
    if ranks:
        rank = [chance.choice(ranks)]
        job.signal(rank, signal.SIGSTOP)
        time.sleep(seconds)
        job.signal(rank, signal.SIGCONT)
    return f"for {seconds:.1f} s, {when}"


def kill_a_data_worker(job: Job, chance: random.Random) -> str:
    when = moment(job, chance)
    workers = [child for rank in job.ranks() for child in children(rank)]
    if not workers:
        return "no worker was there"
    job.signal([chance.choice(workers)], signal.SIGKILL)
    return when


def second_start(job: Job, chance: random.Random) -> str:
    job.at_step(chance.randint(1, STEPS // 2), 0)
    other = subprocess.run(
        job.process.args, env=job.environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    if job.process.poll() is None:
        assert other.returncode != 0, "two runs train in one directory"
        assert "is training in" in other.stderr, other.stderr[-500:]
    return f"after step {last_step(job.directory)}"


# Faults of files, between two attempts: the job has been killed, and its newest checkpoint is then changed.


def checkpoints(directory: Path) -> list[Path]:
    found = sorted((directory / "checkpoints").glob("step_*")) if (directory / "checkpoints").is_dir() else []
    return [path for path in found if path.is_dir()]


def on_files(change: Callable[[Path, random.Random], str]) -> Fault:
    def kill_and_change(job: Job, chance: random.Random) -> str:
        job.at_step(chance.randint(2 * SAVE_EVERY + 2, STEPS - 2), chance.uniform(0, 0.1))
        job.signal([job.process.pid, *job.ranks()], signal.SIGKILL)
        job.wait_for_end(END_SECONDS)
        found = checkpoints(job.directory)
        return change(found[-1], chance) if found else "there was no checkpoint"

    return kill_and_change


def any_file(checkpoint: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size))


def flip_a_bit(checkpoint: Path, chance: random.Random) -> str:
    path = any_file(checkpoint, chance)
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))
    return f"bit of byte {place} of {path.name}"


def cut_a_file(checkpoint: Path, chance: random.Random) -> str:
    path = any_file(checkpoint, chance)
    size = chance.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} to {size} bytes"


def delete_a_file(checkpoint: Path, chance: random.Random) -> str:
    path = any_file(checkpoint, chance)
    path.unlink()
    return path.name


def delete_the_newest(checkpoint: Path, chance: random.Random) -> str:
    shutil.rmtree(checkpoint)
    return checkpoint.name


def swap_two(checkpoint: Path, chance: random.Random) -> str:
    other = next(path for path in reversed(checkpoints(checkpoint.parents[1])) if path != checkpoint)
    between = checkpoint.with_name("between")
    checkpoint.rename(between)
    other.rename(checkpoint)
    between.rename(other)
    return f"{checkpoint.name} and {other.name}"


def cut_the_metrics(checkpoint: Path, chance: random.Random) -> str:
    path = checkpoint.parents[1] / "metrics.jsonl"
    lost = chance.randrange(1, 60)  # within the last line, as a power cut leaves it
    os.truncate(path, path.stat().st_size - lost)
    return f"{lost} bytes"


FAULTS: dict[str, Fault] = {
    "kill_one_rank": send(signal.SIGKILL, "one rank"),
    "kill_all_ranks": send(signal.SIGKILL, "all ranks"),
    "kill_torchrun": send(signal.SIGKILL, "torchrun"),
    "kill_everything": send(signal.SIGKILL, "everything"),
    "kill_all_in_a_save": send(signal.SIGKILL, "everything", in_a_save),
    "kill_one_in_a_save": send(signal.SIGKILL, "one rank", in_a_save),
    "sigterm_to_torchrun": send(signal.SIGTERM, "torchrun"),
    "sigterm_to_a_rank": send(signal.SIGTERM, "one rank"),
    "sigusr1_to_a_rank": send(signal.SIGUSR1, "one rank"),
    "sighup_to_torchrun": send(signal.SIGHUP, "torchrun"),
    "stop_one_rank": stop_one_rank,
    "pause_one_rank": pause_one_rank,
    "kill_a_data_worker": kill_a_data_worker,
    "second_start": second_start,
    "flip_a_bit": on_files(flip_a_bit),
    "cut_a_file": on_files(cut_a_file),
    "delete_a_file": on_files(delete_a_file),
    "delete_the_newest": on_files(delete_the_newest),
    "swap_two_checkpoints": on_files(swap_two),
    "cut_the_metrics": on_files(cut_the_metrics),
}
