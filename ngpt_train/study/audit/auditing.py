"""The audit of a run: checks of its files against each other, then random windows of it trained again."""

from __future__ import annotations

import os
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.studies import AuditConfig
from ngpt_train.config.stored import read_yaml
from ngpt_train.core.errors import DataError
from ngpt_train.study.audit.again import Window
from ngpt_train.study.audit.certificate import FORMAT, Finding, sums_of
from ngpt_train.study.audit.record_checks import check_checkpoint, check_records, last_step
from ngpt_train.study.compare.runs import Run, read_run
from ngpt_train.study.points import DIVERGED
from ngpt_train.training.checkpoint.catalogue import VALIDATION, list_checkpoints, read_validation_losses, step_of

OF_THE_MACHINE = ("device", "cpu")  # facts of run.json; ranks and threads are set as in the run
RANKS_A_CORE, MOST_THREADS = 8, 1024  # limits for the ranks and threads in a run.json
RESULT = ("start", "end", "checkpoint", "train_records", "eval_records", "largest_difference")
NOT_CHECKED = (
    "seconds, rates and memory, which depend on the clock; telemetry; steps outside of the windows but for their "
    "order, lr, tokens, flops and sums; why the run ended, but for a divergence in a window"
)


def windows(checkpoints: Collection[int], last: int, steps: int, cuts: Collection[int] = ()) -> list[tuple[int, int]]:
    """(start, end) of windows that do not overlap. Each begins at step 0 or a checkpoint, and ends at the next
    checkpoint, after `steps`, at the last recorded step or at a cut, where the run continued differently."""
    starts = sorted({0, *(step for step in checkpoints if 0 < step <= last)})
    ends = {start: min([start + steps, last, *(x for x in (*starts, *cuts) if x > start)]) for start in starts}
    return [(start, end) for start, end in ends.items() if end > start]


def audit(
    path: Path,
    options: AuditConfig,
    command_on: Callable[[int], Sequence[str]],
    here: Mapping[str, Any],
    taken: Callable[[Config], Config],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The certificate of the run in `path`, the content of audit.json.

    command_on(ranks): the command that trains a run from the path of its config. here: commit, versions, device, cpu
    of this process, by their names in run.json. taken: the parts of a config that training again takes. Raises
    DataError if `path` cannot be read as a run, and the errors of `taken`.
    """
    run, config = read_run(path), read_yaml(path / "config.yaml")
    of_last, starts = taken(config), run.starts
    if config.train.batch_rows is None:
        raise DataError(f"{path / 'config.yaml'} is damaged: train.batch_rows=null, and a run has a number there")
    if not starts or any(start.get("step") is None for start in starts) or min(start["step"] for start in starts) > 0:
        raise DataError(f"{path / 'run.json'} is damaged: it does not say how the run began")
    _check_room(path, starts)
    sums, checkpoints = sums_of(path), list_checkpoints(path / "checkpoints")
    kept, begun, last = [step_of(x) for x in checkpoints], [start["step"] for start in starts], last_step(run)
    why_not = _other_machine(starts[-1], here)

    sound: dict[int, Config] = {}  # by step: the configs of undamaged checkpoints
    found = _other_commits(starts, here)
    found += check_records(run, config, max(begun), kept, exact=not why_not)
    validation_losses: dict[int, float] = {}
    try:
        validation_losses = read_validation_losses(path / "checkpoints")
    except DataError as error:
        found.append(Finding(VALIDATION, str(error)))
    for checkpoint in checkpoints:
        newest = checkpoint == checkpoints[-1]
        stored, problems = check_checkpoint(checkpoint, run, config, newest, validation_losses)
        if stored is not None:
            sound[step_of(checkpoint)] = taken(stored)
        found += problems
    for finding in found:
        say(f"found: {finding.says}")

    seed = secrets.randbits(32) if options.seed is None else options.seed
    possible = windows(sound, last, options.steps, [*begun, *(rollback["step"] for rollback in run.rollbacks)])
    chosen = sorted(random.Random(seed).sample(possible, min(options.windows, len(possible))))
    trained: list[Window] = []
    with tempfile.TemporaryDirectory(prefix="ngpt-train-audit-") as place:
        for number, (start, end) in enumerate(chosen, start=1):
            say(f"window {number} of {len(chosen)}: trains steps {start + 1} to {end} again")
            governing = next((sound[step] for step in sorted(sound) if step >= end), of_last)
            facts = [x for x in starts if x["step"] <= start][-1]
            tolerance = options.tolerance if _other_machine(facts, here) else None
            window = Window(run, start, end, governing, facts, tolerance)
            window.train_again(command_on(facts.get("world_size") or 1), Path(place, str(number)))
            trained.append(window)
            for finding in window.found:
                say(f"found: {finding.says}")
    if sums_of(path) != sums:
        raise DataError(f"{path} has changed while it was audited; audit it again when nobody writes to it")
    found += [finding for window in trained for finding in window.found]
    return {
        "format": FORMAT,
        "run": str(run.path),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "equal": not found,
        "how": f"within {options.tolerance:g}" if why_not else "to the bit",
        "why_not_to_the_bit": why_not,
        "steps": last,
        "steps_compared": sum(x.end - x.start for x in trained if x.train_records or x.checkpoint),
        "windows": [{name: getattr(x, name) for name in RESULT} | {"equal": not x.found} for x in trained],
        "found": [asdict(finding) for finding in found],
        "not_checked": NOT_CHECKED,
        "notes": [
            *(f"compared within {options.tolerance:g} of each number, not to the bit: {why}" for why in why_not),
            *_unknown(run, here),
            *_not_reached(run, trained, kept),
        ],
        "seed": seed,
        "commit": run.facts.get("git_commit"),
        "device": run.facts.get("device"),
        "here": dict(here),
        "sha256": sums,
    }


def _check_room(path: Path, starts: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError if the run has more ranks or threads than this machine has room for."""
    for name, most in {"threads": MOST_THREADS, "world_size": RANKS_A_CORE * (os.cpu_count() or 1)}.items():
        if (asked := max(start.get(name) or 1 for start in starts)) > most:
            problem = f"{path / 'run.json'} says {name} {asked:,}; this machine has room for {most:,} at most"
            raise DataError(f"{problem}. Audit the run where it was trained.")


def _other_machine(facts: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Reasons why this machine may compute other last digits. A fact that an older run.json lacks counts as equal."""
    there = {name: facts[name] for name in OF_THE_MACHINE if name in facts and name in here}
    there["torch"] = (facts.get("versions") or {}).get("torch")
    now = {**here, "torch": (here.get("versions") or {}).get("torch")}
    found = [f"{name}: {value}, here {now[name]}" for name, value in there.items() if value != now[name]]
    if here.get("repeats_bits") is False:
        found.append("train.deterministic=false, so that this GPU does not give the same bits twice")
    return found


def _other_commits(starts: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> list[Finding]:
    found, now = [], here.get("git_commit")
    for commit in dict.fromkeys(start.get("git_commit") for start in starts):
        if None not in (commit, now) and commit != now:
            says = f"run.json says that commit {commit} trained, this is {now}"
            says += " (+: with changes that are not committed)" if "+" in f"{commit}{now}" else ""
            found.append(Finding("run.json", says, None, "git_commit", commit, now))
    return found


def _unknown(run: Run, here: Mapping[str, Any]) -> list[str]:
    """Notes on facts that run.json does not say."""
    notes, commit = [], run.facts.get("git_commit")
    if commit is None or here.get("git_commit") is None:
        notes.append("the commit of the run, or of this code, is not known")
    elif commit.endswith("+"):
        notes.append(f"commit {commit[:12]} had changes that were not committed: no name says which")
    if unknown := [name for name in (*OF_THE_MACHINE, "threads") if name not in run.facts]:
        notes.append(f"run.json does not say {', '.join(unknown)}: taken as here")
    return notes


def _not_reached(run: Run, trained: Sequence[Window], checkpoints: Sequence[int]) -> list[str]:
    """Notes on files that no window and no sum has checked."""
    notes = []
    reached = {x.start for x in trained} | {x.end for x in trained if x.checkpoint}
    if alone := [f"step_{step:08d}" for step in checkpoints if step not in reached]:
        notes.append(f"no window begins at the weights of {', '.join(alone)}, or compared them at its end")
    if run.evals and not any((run.path / "evals").glob("step_*.npz")):
        notes.append("the run has no evals/: the losses of single rows were compared with nothing")
    if run.end is not None and run.end["code"] == DIVERGED and run.end["step"] not in {x.end for x in trained}:
        notes.append(f"exit.json says that the run diverged at step {run.end['step']}, where no window ends")
    return notes
