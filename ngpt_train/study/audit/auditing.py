"""Audits a run: checks its files against each other, and compares random windows, trained again, with its records."""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.studies import AuditConfig
from ngpt_train.config.stored import read_yaml, write_yaml
from ngpt_train.core.constants import DIVERGED
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_json
from ngpt_train.core.recorded import Record
from ngpt_train.study.audit.certificate import FORMAT, METRICS, Finding, contradiction, sums_of
from ngpt_train.study.audit.record_checks import check_checkpoint, check_records, last_step
from ngpt_train.study.compare.runs import Run, read_rows, read_run
from ngpt_train.study.engines.child import ending_with_us, last_line
from ngpt_train.training.checkpoint import catalogue

OF_THE_MACHINE = ("device", "cpu")  # facts of run.json; ranks and threads are set as in the run
RANKS_A_CORE, MOST_THREADS = 8, 1024  # limits for the ranks and threads in a run.json
RESULT = ("start", "end", "checkpoint", "train_records", "eval_records", "largest_difference")
NOT_CHECKED = (
    "seconds, rates and memory, which depend on the clock; telemetry; steps outside of the windows but for their "
    "order, lr, tokens, flops and sums; why the run ended, but for a divergence in a window"
)
# Fields of records and of state.json which depend on the clock and on other processes.
OF_THE_CLOCK = ("train_seconds", "tokens_per_s", "mfu", "step_time", "data_time", "memory_gb")
# Shares of steps whose norm exceeded a limit: they jump when the norm changes in its last digit.
JUMPS = ("clipped", "skipped")
# Facts of run.json which training again finds too.
FACTS = ("data_fingerprint", "tokenizer_fingerprint", "tokenizer", "n_params", "parallel")
# Variables of a launcher, which would make the training of a window one of its ranks.
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


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
) -> dict[str, Any]:
    """The certificate of the run in `path`, the content of audit.json. Prints what it does and finds.

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
    sums, checkpoints = sums_of(path), catalogue.list_checkpoints(path / "checkpoints")
    kept, begun = [catalogue.step_of(x) for x in checkpoints], [start["step"] for start in starts]
    last, why_not = last_step(run), _other_machine(starts[-1], here)

    sound: dict[int, Config] = {}  # by step: the configs of undamaged checkpoints
    found = [*_other_commits(starts, here), *check_records(run, config, max(begun), kept, exact=not why_not)]
    try:
        validation_losses = catalogue.read_validation_losses(path / "checkpoints")
    except DataError as error:
        validation_losses = {}
        found.append(Finding(catalogue.VALIDATION, str(error)))
    for checkpoint in checkpoints:
        stored, problems = check_checkpoint(checkpoint, run, config, checkpoint == checkpoints[-1], validation_losses)
        if stored is not None:
            sound[catalogue.step_of(checkpoint)] = taken(stored)
        found += problems
    _print(found)

    seed = secrets.randbits(32) if options.seed is None else options.seed
    possible = windows(sound, last, options.steps, [*begun, *(rollback["step"] for rollback in run.rollbacks)])
    chosen = sorted(random.Random(seed).sample(possible, min(options.windows, len(possible))))
    trained: list[Window] = []
    with tempfile.TemporaryDirectory(prefix="ngpt-train-audit-") as place:
        for number, (start, end) in enumerate(chosen, start=1):
            print(f"window {number} of {len(chosen)}: trains steps {start + 1} to {end} again", flush=True)
            governing = next((sound[step] for step in sorted(sound) if step >= end), of_last)
            facts = [x for x in starts if x["step"] <= start][-1]
            tolerance = options.tolerance if _other_machine(facts, here) else None
            window = Window(run, start, end, governing, facts, tolerance)
            window.train_again(command_on(facts.get("world_size") or 1), Path(place, str(number)))
            trained.append(window)
            _print(window.found)
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


def _print(found: Sequence[Finding]) -> None:
    for finding in found:
        print(f"found: {finding.says}", flush=True)


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


def _other_commits(starts: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> Iterator[Finding]:
    now = here.get("git_commit")
    for commit in dict.fromkeys(start.get("git_commit") for start in starts):
        if None not in (commit, now) and commit != now:
            says = f"run.json says that commit {commit} trained, this is {now}"
            says += " (+: with changes that are not committed)" if "+" in f"{commit}{now}" else ""
            yield Finding("run.json", says, None, "git_commit", commit, now)


def _unknown(run: Run, here: Mapping[str, Any]) -> Iterator[str]:
    """Notes on facts that run.json does not say."""
    commit = run.facts.get("git_commit")
    if commit is None or here.get("git_commit") is None:
        yield "the commit of the run, or of this code, is not known"
    elif commit.endswith("+"):
        yield f"commit {commit[:12]} had changes that were not committed: no name says which"
    if unknown := [name for name in (*OF_THE_MACHINE, "threads") if name not in run.facts]:
        yield f"run.json does not say {', '.join(unknown)}: taken as here"


def _not_reached(run: Run, trained: Sequence[Window], checkpoints: Sequence[int]) -> Iterator[str]:
    """Notes on files that no window and no sum has checked."""
    reached = {x.start for x in trained} | {x.end for x in trained if x.checkpoint}
    if alone := [f"step_{step:08d}" for step in checkpoints if step not in reached]:
        yield f"no window begins at the weights of {', '.join(alone)}, or compared them at its end"
    if run.evals and not any((run.path / "evals").glob("step_*.npz")):
        yield "the run has no evals/: the losses of single rows were compared with nothing"
    if run.end is not None and run.end["code"] == DIVERGED and run.end["step"] not in {x.end for x in trained}:
        yield f"exit.json says that the run diverged at step {run.end['step']}, where no window ends"


@dataclass
class Window:
    """The steps after `start` up to `end`: how to train them again, and the comparison.

    config: the config of these steps. facts: of the start in run.json which trained them. tolerance: None compares to
    the bit. The fields from `checkpoint` on are the result. checkpoint: True if the weights at the end were compared
    with a checkpoint of the run. largest_difference: relative.
    """

    run: Run
    start: int  # the step of a checkpoint; 0 for the first weights
    end: int
    config: Config
    facts: Mapping[str, Any]
    tolerance: float | None
    checkpoint: bool = False
    train_records: int = 0
    eval_records: int = 0
    largest_difference: float = 0.0
    found: list[Finding] = field(default_factory=list)

    def train_again(self, command: Sequence[str], place: Path) -> None:
        """Trains the window in `place` and compares the result. command: trains a run from the path of its config."""
        again, begin = place / "again", self.run.path / "checkpoints" / f"step_{self.start:08d}"
        config = self._config_again(again)
        again.mkdir(parents=True)
        if self.start:
            copy_checkpoint(begin, again / "checkpoints" / begin.name)
            write_yaml(config, again / "config.yaml")
            write_json(again / "run.json", {"starts": [dict(self.facts)], "saved": self.start})
        write_yaml(config, place / "config.yaml")
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
        if (threads := self.facts.get("threads")) is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        with (place / "log").open("wb") as log:
            arguments = [*ending_with_us(), *command, str(place / "config.yaml")]
            process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        diverged_as_recorded = code == DIVERGED == (self.run.end or {}).get("code")
        if code and not diverged_as_recorded:
            said = last_line(place / "log")
            problem = said.partition(": ")[2] or said or f"exit code {code}"
            says = f"steps {self.start + 1} to {self.end} cannot be trained again: {problem}"
            self.found.append(Finding("training again", says, self.start))
        else:
            self._compare(read_run(again))

    def _config_again(self, place: Path) -> Config:
        """The config of the run in another place. It ends with the window, and writes records and one checkpoint."""
        config = self.config
        own: dict[str, Any] = dict.fromkeys(("resume_step", "allow_change", "max_time"))
        own |= {"root": str(place.parent), "name": place.name, "resume": "auto", "overwrite": False}
        wandb = replace(config.logging.wandb, mode="disabled")
        return replace(
            config,
            run=replace(config.run, **own),
            train=replace(config.train, stop_at=self.end, profile=False),
            checkpoint=replace(config.checkpoint, every=0, keep_last=1, keep_every=None, keep_best=0),
            guards=replace(config.guards, rollback=False),
            logging=replace(config.logging, telemetry=0, tensorboard=False, wandb=wandb),
        )

    def _compare(self, again: Run) -> None:
        run, start, end = self.run, self.start, self.end
        for name in FACTS:
            recorded, now = self.facts.get(name), again.facts.get(name)
            if recorded != now:
                of_data = name.endswith("_fingerprint")
                meaning = ": it was trained on other data, or with another tokenizer" if of_data else ""
                says = f"run.json says {name} {recorded}, training again {now}{meaning}"
                self.found.append(Finding("data" if of_data else "run.json", says, None, name, recorded, now))
        then, now = ({x["step"]: x for x in of.train if start < x["step"] <= end} for of in (run, again))
        self.train_records = self._compare_records("train", then, now)
        then, now = self._evals(run), self._evals(again)
        # A training ends with a validation. The run may have continued without one, or was killed before it.
        is_due = end >= self.config.train.steps or (self.config.eval.every > 0 and end % self.config.eval.every == 0)
        if end not in then and (not is_due or (run.end is None and end >= last_step(run))):
            now.pop(end, None)
        if start not in now:
            then.pop(start, None)  # from an earlier end of the run, at the checkpoint where this training begins
        self.eval_records = self._compare_records("eval", then, now)
        for step in sorted(then.keys() & now.keys()):
            self._compare_rows(again, step)
        self._compare_checkpoints(again)
        said = run.end or {}
        # A run with rollbacks may diverge by its losses alone; training again has no rollbacks and survives them.
        is_judged = said.get("step") == end and self.tolerance is None and not self.config.guards.rollback
        if is_judged and said["code"] == DIVERGED and (again.end or {}).get("code") == 0:
            says = f"exit.json says that the run diverged at step {end}, training again does not"
            self.found.append(Finding("exit.json", says, end, "code", DIVERGED, 0))

    def _evals(self, run: Run) -> dict[int, Record]:
        """The validations in the window. With eval.budget a validation at the end of a training has other rows."""
        fewer = self.config.eval.budget is not None and self.end < self.config.train.steps
        last = self.end - 1 if fewer else self.end
        return {record["step"]: record for record in run.evals if self.start <= record["step"] <= last}

    def _compare_records(self, kind: str, then: Mapping[int, Record], now: Mapping[int, Record]) -> int:
        """Compares the records of a kind by step; returns the number of compared pairs."""
        for step in sorted(now.keys() - then.keys()):
            self.found.append(Finding(METRICS, f"there is no {kind} record of step {step}", step))
        for step in sorted(then.keys() - now.keys()):
            says = f"there is a {kind} record of step {step}, which training again does not write"
            self.found.append(Finding(METRICS, says, step))
        both = sorted(then.keys() & now.keys())
        left_out = OF_THE_CLOCK if self.tolerance is None else OF_THE_CLOCK + JUMPS
        for step in both:
            for name in dict.fromkeys([*then[step], *now[step]]):
                if name not in left_out and not self._agree(then[step].get(name), now[step].get(name)):
                    self.found.append(contradiction(then[step], name, "training again gives", now[step].get(name)))
        return len(both)

    def _agree(self, one: Any, other: Any) -> bool:
        if not (type(one) is type(other) is float):
            return bool(one == other) and type(one) is type(other)
        if one == other or (math.isnan(one) and math.isnan(other)):  # NaN: a skipped step
            return True
        self.largest_difference = max(self.largest_difference, abs(one - other) / max(abs(one), abs(other)))
        return self.tolerance is not None and math.isclose(one, other, rel_tol=self.tolerance)

    def _compare_rows(self, again: Run, step: int) -> None:
        """Compares the losses of the rows; `check_records` names a missing file."""
        for path in sorted((again.path / "evals").glob(f"step_{step:08d}*.npz")):
            try:
                one, other = read_rows(self.run.path / "evals" / path.name), read_rows(path)
            except DataError:
                continue
            same = one.rows_hash == other.rows_hash and np.array_equal(one.n_targets, other.n_targets)
            pairs = zip(one.loss_sum.tolist(), other.loss_sum.tolist(), strict=False)
            agree = [self._agree(a, b) for a, b in pairs]  # no early end: the largest difference needs all rows
            if not same or not all(agree):
                says = f"evals/{path.name} has other losses of rows than training again"
                self.found.append(Finding(f"evals/{path.name}", says, step))

    def _compare_checkpoints(self, again: Run) -> None:
        """Compares weights, moments and counters at the end of the window, by their checksums."""
        one, other = (of.path / "checkpoints" / f"step_{self.end:08d}" for of in (self.run, again))
        if self.tolerance is not None or not (one / catalogue.MANIFEST).is_file():
            return
        try:
            files, files_now = catalogue.read_manifest(one), catalogue.read_manifest(other)
            counters, counters_now = dict(read_json(one / catalogue.STATE)), dict(read_json(other / catalogue.STATE))
        except (DataError, TypeError, ValueError):
            return  # `check_checkpoint` names a damaged one
        self.checkpoint = True
        tensors, tensors_now = ({x: of[x] for x in of if catalogue.has_tensors(x)} for of in (files, files_now))
        if tensors != tensors_now:
            says = f"the weights or moments of checkpoint {one.name} are not those of training again"
            self.found.append(Finding(one.name, says, self.end))
        for name in dict.fromkeys([*counters, *counters_now]):
            then, now = counters.get(name), counters_now.get(name)
            # guards: the losses of guards.rollback, which training again does not keep.
            if name not in (*OF_THE_CLOCK, "guards") and json.dumps(then) != json.dumps(now):
                says = f"{name} in state.json of checkpoint {one.name} is not what training again ends with"
                self.found.append(Finding(one.name, says, self.end, name, then, now))


def copy_checkpoint(checkpoint: Path, target: Path) -> None:
    """Copies the files in the manifest. Others are not verified, and may be links to anywhere."""
    target.mkdir(parents=True)
    for name in (catalogue.MANIFEST, *catalogue.read_manifest(checkpoint)):
        shutil.copyfile(checkpoint / name, target / name)
