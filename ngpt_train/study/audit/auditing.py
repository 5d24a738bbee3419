"""The audit of one run: what its files say of each other, then windows of it trained again."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import TABLES
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.studies import AuditConfig
from ngpt_train.config.stored import read_yaml, to_dict, what_differs
from ngpt_train.config.validate import flatten, show
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json
from ngpt_train.study.audit.again import Compared, Exactness, Window, choose, compare, train_again
from ngpt_train.study.audit.certificate import FORMAT, Finding, sums_of
from ngpt_train.study.audit.record_checks import METRICS, check_records
from ngpt_train.study.compare.runs import Run, read_run
from ngpt_train.study.points import DIVERGED
from ngpt_train.training.checkpoint.catalogue import VALIDATION, list_checkpoints, step_of
from ngpt_train.training.checkpoint.integrity import STATE, differences, read_manifest, read_progress

# Facts of run.json by which this machine may compute otherwise than the run's. Ranks and threads are made the run's.
OF_THE_MACHINE = ("device", "cpu")
# What a run.json can make this machine start.
RANKS_A_CORE = 8
MOST_THREADS = 1024


def audit(
    path: Path,
    options: AuditConfig,
    command_on: Callable[[int], Sequence[str]],
    here: Mapping[str, Any],
    taken: Callable[[Config], Config],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The certificate of the run in `path`, as audit.json has it.

    command_on: the command that trains a run from the path of its config, on so many ranks. here: commit, versions, cpu
    and so on of this process, as run.json names them. taken: what training again takes of a config of the run. Raises
    DataError where `path` cannot be read as a run, and what `taken` raises.
    """
    run, config = read_run(path), read_yaml(path / "config.yaml")
    of_last, starts = taken(config), run.starts
    if not starts or any(start.get("step") is None for start in starts):
        raise DataError(f"{path / 'run.json'} is damaged: it does not say how the run began")
    _check_room(path, starts)
    sums = sums_of(path)
    checkpoints = list_checkpoints(path / "checkpoints")
    begun = sorted({start["step"] for start in starts} - {0})
    last = max((x["step"] for x in [*run.train, *run.evals]), default=0)
    exact = not _other_machine(starts[-1], here)

    sound = {}  # the configs of checkpoints from which training may go on, by step
    found = _commit(starts, here)
    found += check_records(run, config, begun, [step_of(x) for x in checkpoints], exact)
    for checkpoint in checkpoints:
        problems = _checkpoint(checkpoint, run, config, starts, newest=checkpoint == checkpoints[-1])
        if not any(problem.where == checkpoint.name and problem.field is None for problem in problems):
            sound[step_of(checkpoint)] = taken(read_yaml(checkpoint / "config.yaml"))
        found += problems
    for finding in found:
        say(f"found: {finding.says}")

    seed = secrets.randbits(32) if options.seed is None else options.seed
    cuts = [*begun, *(rollback["step"] for rollback in run.rollbacks)]
    chosen = choose(sorted(sound), last, options.windows, options.steps, seed, cuts)
    windows: list[Compared] = []
    with tempfile.TemporaryDirectory(prefix="ngpt-train-audit-") as place:
        for number, window in enumerate(chosen, start=1):
            say(f"window {number} of {len(chosen)}: trains steps {window.start + 1} to {window.end} again")
            governing = next((sound[step] for step in sorted(sound) if step >= window.end), of_last)
            facts = [start for start in starts if start["step"] <= window.start][-1]
            exactness = Exactness(tuple(_other_machine(facts, here)), options.tolerance)
            windows.append(_window(run, governing, window, command_on, Path(place, str(number)), facts, exactness))
            for finding in windows[-1].found:
                say(f"found: {finding.says}")
    if sums_of(path) != sums:
        raise DataError(f"{path} has changed while it was audited; audit it again when nobody writes to it")
    found += [finding for window in windows for finding in window.found]
    exactness = Exactness(tuple(_other_machine(starts[-1], here)), options.tolerance)
    kept = [step_of(x) for x in checkpoints]
    return _certificate(run, windows, kept, found, exactness, here, seed, sums, last)


def _window(
    run: Run,
    config: Config,
    window: Window,
    command_on: Callable[[int], Sequence[str]],
    place: Path,
    facts: Mapping[str, Any],
    exactness: Exactness,
) -> Compared:
    command = command_on(facts.get("world_size") or 1)
    again, problem = train_again(run, config, window, command, place, facts)
    if again is None:
        says = f"steps {window.start + 1} to {window.end} cannot be trained again: {problem}"
        return Compared(window, found=[Finding("training again", says, window.start)])
    return compare(run, again, window, config, facts, exactness)


def _check_room(path: Path, starts: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError for a run whose ranks or threads are more than this machine has room for."""
    most = {"threads": MOST_THREADS, "world_size": RANKS_A_CORE * (os.cpu_count() or 1)}
    for name, number in most.items():
        if (asked := max(start.get(name) or 1 for start in starts)) > number:
            problem = f"{path / 'run.json'} says {name} {asked:,}; this machine has room for {number:,} at most"
            raise DataError(f"{problem}. Audit the run where it was trained.")


def _other_machine(facts: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words, by what this machine computes otherwise. What a run from before a fact was noted does not say counts as
    the same."""
    found = []
    for name in OF_THE_MACHINE:
        if name in here and name in facts and facts[name] != here[name]:
            found.append(f"{name}: {facts[name]}, here {here[name]}")
    torch, torch_here = ((of.get("versions") or {}).get("torch") for of in (facts, here))
    if torch != torch_here:
        found.append(f"torch: {torch}, here {torch_here}")
    if here.get("repeats_bits") is False:
        found.append("train.deterministic=false, so that this GPU does not give the same bits twice")
    return found


def _commit(starts: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> list[Finding]:
    """Another commit than the code that trains again, in any start whose steps the run has."""
    found = []
    for commit in dict.fromkeys(start.get("git_commit") for start in starts):
        if commit is not None and here.get("git_commit") is not None and commit != here["git_commit"]:
            says = f"run.json says that commit {commit} trained, this is {here['git_commit']}"
            says += " (+: with changes that are not committed)" if "+" in f"{commit}{here['git_commit']}" else ""
            found.append(Finding("run.json", says, None, "git_commit", commit, here["git_commit"]))
    return found


def _checkpoint(
    path: Path, run: Run, config: Config, starts: Sequence[Mapping[str, Any]], newest: bool
) -> list[Finding]:
    """Compares a kept checkpoint with the records and config.yaml."""
    step, name = step_of(path), path.name
    try:
        problems = differences(path, read_manifest(path).files)
        progress = read_progress(path)
        stored = read_yaml(path / "config.yaml")
    except DataError as error:
        return [Finding(name, f"checkpoint {name}: {error}", step)]
    if problems:
        return [Finding(name, f"checkpoint {name}: {'; '.join(problems)}", step)]
    found = []
    last_start = max((start.get("step", 0) for start in starts), default=0)
    changed = {x.get("key") for start in starts for x in start.get("changed") or []}
    if newest and step > last_start and (path / "config.yaml").read_bytes() != (run.path / "config.yaml").read_bytes():
        changed = set()
        keys_then, keys_now = (dict(flatten(to_dict(each), TABLES)) for each in (stored, config))
        differing = [(name, old, keys_now[name]) for name, old in keys_then.items() if old != keys_now[name]]
        differing = differing or [("its text", "another", "")]
    else:
        differing = what_differs(stored, config)
    for key, old, new in differing:
        if key not in changed:
            says = f"config.yaml says {key}={show(new)}, checkpoint {name} was trained with {show(old)}"
            found.append(Finding("config.yaml", says, step, key, new, old))
    record: Mapping[str, Any] = next((x for x in run.train if x["step"] == step), {})
    said = {"loss": read_json(path / "MANIFEST.json").get("loss")}
    said |= {"tokens": progress["tokens"], "data_hash": progress["data"].get("data_hash")}
    validated = path.parent / VALIDATION
    losses = read_json(validated) if validated.is_file() else {}
    pairs = [("train", record, field, value) for field, value in said.items()]
    of_eval: Mapping[str, Any] = next((x for x in run.evals if x["step"] == step), {})
    pairs.append(("eval", of_eval, "loss", losses.get(str(step))))
    for kind, of_record, field, value in pairs:
        if value is not None and field in of_record and of_record[field] != value:
            where = {"loss": "its manifest" if kind == "train" else VALIDATION}.get(field, STATE)
            says = (
                f"the {kind} record of step {step} says {field} {of_record[field]}, checkpoint {name} ({where}) {value}"
            )
            found.append(Finding(METRICS, says, step, field, of_record[field], value))
    return found


def _certificate(
    run: Run,
    windows: Sequence[Compared],
    checkpoints: Sequence[int],
    found: Sequence[Finding],
    exactness: Exactness,
    here: Mapping[str, Any],
    seed: int,
    sums: Mapping[str, str],
    last: int,
) -> dict[str, Any]:
    of_windows = [
        {
            **{"start": x.window.start, "end": x.window.end, "equal": not x.found, "checkpoint": x.checkpoint},
            **{"train_records": x.train_records, "eval_records": x.eval_records, "largest_difference": x.largest},
        }
        for x in windows
    ]
    return {
        "format": FORMAT,
        "run": str(run.path),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "equal": not found,
        "how": "to the bit" if exactness.to_the_bit else f"within {exactness.tolerance:g}",
        "why_not_to_the_bit": list(exactness.why_not),
        "steps": last,
        "steps_compared": sum(x.window.end - x.window.start for x in windows if x.train_records or x.checkpoint),
        "windows": of_windows,
        "found": [finding.as_dict() for finding in found],
        "not_checked": "seconds, rates and memory, which depend on the clock; telemetry; steps outside of the windows "
        "but for their order, lr, tokens, flops and sums; why the run ended, but for a divergence in a window",
        "notes": [*_notes(run, here, exactness), *_not_reached(run, windows, checkpoints)],
        "seed": seed,
        "commit": run.facts.get("git_commit"),
        "device": run.facts.get("device"),
        "here": dict(here),
        "sha256": dict(sums),
    }


def _notes(run: Run, here: Mapping[str, Any], exactness: Exactness) -> list[str]:
    """Notes for readers of the certificate."""
    notes = [
        f"compared within {exactness.tolerance:g} of each number, not to the bit: {why}" for why in exactness.why_not
    ]
    commit = run.facts.get("git_commit")
    if commit is None or here.get("git_commit") is None:
        notes.append("the commit of the run, or of this code, is not known")
    elif commit.endswith("+"):
        notes.append(f"commit {commit[:12]} had changes that were not committed: no name says which")
    if unknown := [name for name in (*OF_THE_MACHINE, "threads") if name not in run.facts]:
        notes.append(f"run.json does not say {', '.join(unknown)}: taken as here")
    return notes


def _not_reached(run: Run, windows: Sequence[Compared], checkpoints: Sequence[int]) -> list[str]:
    """Files of the run that neither a window nor a sum has checked."""
    notes = []
    ends = {x.window.end for x in windows}
    reached = {x.window.start for x in windows} | {x.window.end for x in windows if x.checkpoint}
    if alone := [f"step_{step:08d}" for step in checkpoints if step not in reached]:
        notes.append(f"no window begins at the weights of {', '.join(alone)}, or compared them at its end")
    if run.evals and not any((run.path / "evals").glob("step_*.npz")):
        notes.append("the run has no evals/: the losses of single rows were compared with nothing")
    if run.end is not None and run.end["code"] == DIVERGED and run.end["step"] not in ends:
        notes.append(f"exit.json says that the run diverged at step {run.end['step']}, where no window ends")
    return notes
