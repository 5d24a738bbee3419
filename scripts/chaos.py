"""Breaks small runs in every way that it knows, at random moments, and compares what they end with.

    python scripts/chaos.py --faults 100 --out DIR
    python scripts/chaos.py --faults 10 --only kill_all_in_a_save --out DIR
    python scripts/chaos.py --list

For each of SETTINGS it first trains an undisturbed run. Each fault then begins the same run in a new directory under
torchrun, breaks it once at a moment drawn from --seed, waits for its end, and gives the same command again until the
run is finished. A run is right if every step is in metrics.jsonl once, with the undisturbed run's loss, gradient norm
and data hash, and if the tensors of its last checkpoint are the undisturbed run's, all to the bit. It is a hang if an
attempt, or the end after a fault, takes longer than the fault's limit. The table goes to OUT/chaos.md, a line per
fault to OUT/chaos.jsonl; the directories of runs that were not right stay in OUT.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import END_SECONDS, FAULTS, HANG_SECONDS, SAVE_EVERY, START_SECONDS, STEPS, Job
from safetensors import safe_open

RANKS = 2
HANG_END_SECONDS = 2 * HANG_SECONDS + 45  # the watchdog, then torchrun's 30 seconds before it kills a stopped rank
MOST_ATTEMPTS = 6
WORDS = ["the", "model", "reads", "a", "row", "of", "tokens", "and", "moves", "every", "vector", "towards", "it"]

SETTINGS = {
    "ngpt, ddp, prepared": ["model=ngpt", "parallel=ddp", "parallel.check_replicas=7"],
    "ngpt, fsdp, streamed": ["model=ngpt", "parallel=fsdp", "data.streaming=true", "data.workers=2"],
    "gpt, fsdp, prepared, average": ["model=gpt", "parallel=fsdp", "optim.ema_decay=0.9"],
    "powernorm, ddp, prepared": ["model=powernorm", "parallel=ddp"],
}


@dataclass
class Result:
    """What became of one fault."""

    fault: str
    setting: str
    what: str = ""
    restarts: int = 0  # commands after the first
    end_seconds: float | None = None  # from the fault to the end of the attempt; None if the run went on to its end
    first_step_seconds: list[float] = field(default_factory=list)  # from a command to its first step
    problems: list[str] = field(default_factory=list)


def arguments(setting: str, directory: Path) -> list[str]:
    out = directory.parent if directory.parent.name != "reference" else directory.parents[1]
    given = [
        "scale=debug", "data=local", f"data.path={out / 'text.jsonl'}", "data.val_fraction=0.2",
        f"data.cache={out / 'cache'}", "tokenizer=bytes", f"run.root={directory.parent}", f"run.name={directory.name}",
        f"train.steps={STEPS}", "train.batch_rows=8", "train.micro_rows=2", "train.device=cpu", "eval.every=20",
        "eval.rows=8", f"checkpoint.every={SAVE_EVERY}", "checkpoint.keep_last=3", "logging.every=1",
        "logging.wandb.mode=disabled", f"parallel.hang_seconds={HANG_SECONDS}",
    ]  # fmt: skip
    return [*given, *SETTINGS[setting]]


def start(directory: Path, output: Path, setting: str) -> Job:
    directory.parent.mkdir(parents=True, exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with output.open("a") as file:
        process = subprocess.Popen(
            [*torchrun, "--max-restarts=2", "-m", "ngpt_train", "train", *arguments(setting, directory)],
            stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment,
        )  # fmt: skip
    return Job(process, environment, directory)


def finished(directory: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):
        end = json.loads((directory / "exit.json").read_text())
        return bool(end["code"] == 0 and end["step"] == STEPS)
    return False


def numbers(directory: Path) -> dict[int, tuple[Any, ...]]:
    """Loss, gradient norm and data hash by step. Raises ValueError where a step appears twice."""
    found: dict[int, tuple[Any, ...]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            if record["step"] in found:
                raise ValueError(f"step {record['step']} is there twice")
            found[record["step"]] = (record["loss"], record["grad_norm"], record["data_hash"], record["tokens"])
    return found


def tensors(checkpoint: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            found |= {f"{path.name}: {name}": file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    return found


def differences(directory: Path, reference: Path) -> list[str]:
    """What of a finished run is not the undisturbed run's."""
    problems = []
    try:
        own, other = numbers(directory), numbers(reference)
    except ValueError as error:
        return [str(error)]
    if missing := sorted(set(other) - set(own)):
        problems.append(f"steps {missing} are lost")
    if wrong := [step for step in own if own[step] != other.get(step)]:
        problems.append(f"steps {wrong} differ: {own[wrong[0]]}, undisturbed {other.get(wrong[0])}")
    last = f"checkpoints/step_{STEPS:08d}"
    if tensors(directory / last) != tensors(reference / last):
        problems.append("tensors of the last checkpoint differ")
    return problems


def modified(directory: Path) -> float:
    with contextlib.suppress(OSError):
        return (directory / "metrics.jsonl").stat().st_mtime
    return 0.0


def suffer(name: str, setting: str, directory: Path, reference: Path, chance: random.Random) -> Result:
    """One run with one fault, until it is finished."""
    result = Result(name, setting)
    log = directory.parent / f"{directory.name}.log"
    job = start(directory, log, setting)
    try:
        result.what = FAULTS[name](job, chance)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    struck = time.monotonic()
    limit = START_SECONDS + END_SECONDS + (HANG_END_SECONDS if name == "stop_one_rank" else 0)
    if not job.wait_for_end(limit):
        result.problems.append(f"hang: no end {limit} s after the fault")
    if not finished(directory):
        result.end_seconds = time.monotonic() - struck
    while not finished(directory) and result.restarts < MOST_ATTEMPTS and not result.problems:
        result.restarts += 1
        began, before = time.monotonic(), modified(directory)
        job = start(directory, log, setting)
        if job.wait_until(lambda before=before: modified(directory) > before):  # type: ignore[misc]
            result.first_step_seconds.append(time.monotonic() - began)
        if not job.wait_for_end(START_SECONDS + END_SECONDS):
            result.problems.append(f"hang: attempt {result.restarts} did not end")
    if not finished(directory):
        result.problems.append(f"not finished after {result.restarts} more commands; see {log}")
    elif not result.problems:
        result.problems += differences(directory, reference)
    if not result.problems:
        shutil.rmtree(directory)
        log.unlink()
    return result


def write_corpus(path: Path) -> None:
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(800):
            words = [generator.choice(WORDS) for _ in range(generator.randint(20, 60))]
            file.write(json.dumps({"text": " ".join(words) + "."}) + "\n")


def table(results: list[Result]) -> str:
    lines = [
        "| fault | runs | right | seconds to the end, most | commands after it, most | seconds to the first step |",
        "|---|---|---|---|---|---|",
    ]
    by_fault = collections.defaultdict(list)
    for result in results:
        by_fault[result.fault].append(result)
    for name in FAULTS:
        if group := by_fault.get(name):
            right = sum(not result.problems for result in group)
            ends = [result.end_seconds for result in group if result.end_seconds is not None]
            starts = [seconds for result in group for seconds in result.first_step_seconds]
            end = f"{max(ends):.0f}" if ends else ""
            first = f"{statistics.median(starts):.0f}" if starts else ""
            commands = max(result.restarts for result in group)
            lines.append(f"| {name.replace('_', ' ')} | {len(group)} | {right} | {end} | {commands} | {first} |")
    right = sum(not result.problems for result in results)
    lines.append(f"| all | {len(results)} | {right} | | | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="the faults, and no run")
    given = parser.parse_args()
    if given.list:
        print("\n".join(FAULTS))
        return 0
    if given.out is None:
        parser.error("--out DIR is missing")
    out = given.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty; name a new directory")
    out.mkdir(parents=True, exist_ok=True)
    write_corpus(out / "text.jsonl")
    references = {}
    for number, setting in enumerate(SETTINGS):
        directory = out / "reference" / f"{number}"
        log = out / f"reference-{number}.log"
        job = start(directory, log, setting)
        if not job.wait_for_end(300) or not finished(directory):
            print(f"the undisturbed run of {setting!r} failed: see {log}")
            return 1
        references[setting] = directory
    results = []
    for index in range(given.faults):
        name = given.only[index % len(given.only)]
        chance = random.Random(f"{given.seed} {index}")
        setting = list(SETTINGS)[(index // len(given.only) + index) % len(SETTINGS)]
        if name == "kill_a_data_worker":
            setting = "ngpt, fsdp, streamed"
        result = suffer(name, setting, out / f"{index:04d}", references[setting], chance)
        results.append(result)
        with (out / "chaos.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        verdict = "; ".join(result.problems) or "right"
        print(f"{index + 1}/{given.faults} {name}, {setting}, {result.what}: {verdict}", flush=True)
        (out / "chaos.md").write_text(table(results))
    print(table(results))
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
