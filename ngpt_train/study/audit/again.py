"""Chooses windows of a run, trains each again in a directory of its own, and compares what comes out with what the run
recorded."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.config.stored import write_yaml
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_json
from ngpt_train.study.audit.certificate import Finding
from ngpt_train.study.audit.record_checks import METRICS
from ngpt_train.study.compare.row_losses import read_rows
from ngpt_train.study.compare.runs import Run, read_run
from ngpt_train.study.engines import child
from ngpt_train.study.points import DIVERGED
from ngpt_train.training.checkpoint.catalogue import MANIFEST
from ngpt_train.training.checkpoint.integrity import STATE, has_tensors, read_manifest

# Of records and of state.json: what depends on the clock and on what else the machine does.
OF_THE_CLOCK = ("train_seconds", "tokens_per_s", "mfu", "step_time", "data_time", "memory_gb")
# Shares of steps whose norm was above a limit, which jump where the norm moves a little.
JUMPS = ("clipped", "skipped")
# Facts of run.json that training again finds too.
FACTS = ("data_fingerprint", "tokenizer_fingerprint", "tokenizer", "n_params", "parallel")
NAME = "again"
# What a launcher sets for its processes. An audit starts its own.
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Window(NamedTuple):
    """The steps after `start`, from the checkpoint of that step or, at 0, from the first weights, up to `end`."""

    start: int
    end: int


def choose(
    checkpoints: Sequence[int], last: int, most: int, steps: int, seed: int, cuts: Collection[int] = ()
) -> list[Window]:
    """At most `most` windows of at most `steps` steps, drawn at random from those that there are, in their order.

    checkpoints: the steps of those that are kept. last: the last recorded step. cuts: steps that no window crosses,
    because the run went on differently there.
    """
    found = windows(checkpoints, last, steps, cuts)
    return sorted(random.Random(seed).sample(found, min(most, len(found))))


def windows(checkpoints: Sequence[int], last: int, steps: int, cuts: Collection[int] = ()) -> list[Window]:
    """Windows that do not overlap: from step 0 and from each checkpoint to the next one, or as far as `steps` goes."""
    kept = sorted({step for step in checkpoints if 0 < step <= last})
    found = []
    for start in (0, *kept):
        end = min([start + steps, last, *(step for step in (*kept, *cuts) if step > start)])
        if end > start:
            found.append(Window(start, end))
    return found


@dataclass
class Compared:
    """The comparison of one window. largest: the largest relative difference of a number."""

    window: Window
    train_records: int = 0
    eval_records: int = 0
    checkpoint: bool = False  # whether the weights at its end were compared with a checkpoint of the run
    largest: float = 0.0
    found: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Exactness:
    """Whether numbers must be equal to the bit, or within a relative tolerance, and then why."""

    why_not: tuple[str, ...]
    tolerance: float

    @property
    def to_the_bit(self) -> bool:
        return not self.why_not


def train_again(
    run: Run, config: Config, window: Window, command: Sequence[str], place: Path, facts: Mapping[str, Any]
) -> tuple[Run | None, str]:
    """Trains the window in `place`; the run that comes out, or None and why there is none.

    config: the one that governed these steps, as far as it is taken. command: trains a run from the path of its config.
    facts: of the start in run.json, which says how many ranks and threads there were.
    """
    directory = place / NAME
    begin = run.path / "checkpoints" / f"step_{window.start:08d}"
    config = _of_copy(config, place, window)
    directory.mkdir(parents=True)
    if window.start:
        copy_checkpoint(begin, directory / "checkpoints" / begin.name)
        write_yaml(config, directory / "config.yaml")
        write_json(directory / "run.json", {"starts": [dict(facts)], "saved": window.start})
    write_yaml(config, place / "config.yaml")
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    if facts.get("threads") is not None:
        environment["OMP_NUM_THREADS"] = str(facts["threads"])
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [*child.ending_with_us(), *command, str(place / "config.yaml")],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code and not (code == DIVERGED and run.end is not None and run.end["code"] == DIVERGED):
        return None, _last_error((place / "log").read_text(errors="replace")) or f"exit code {code}"
    return read_run(directory), ""


def copy_checkpoint(checkpoint: Path, target: Path) -> None:
    """Copies the files that the manifest names, which `differences` has looked at: others may lead anywhere."""
    target.mkdir(parents=True)
    for name in (MANIFEST, *read_manifest(checkpoint).files):
        shutil.copyfile(checkpoint / name, target / name)


def command_of(module: str, ranks: int) -> list[str]:
    """The command that runs `module` on as many ranks as the run had."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", module]


def _of_copy(config: Config, place: Path, window: Window) -> Config:
    """The config of the copy: the run's, but for its place, its end, and what is written besides records."""
    config = copy.deepcopy(config)
    wandb = replace(config.logging.wandb, mode="disabled")
    return replace(
        config,
        run=replace(
            config.run,
            root=str(place),
            name=NAME,
            resume="auto",
            resume_step=None,
            overwrite=False,
            allow_change=None,
            max_time=None,
        ),
        train=replace(config.train, stop_at=window.end, profile=False),
        checkpoint=replace(config.checkpoint, every=0, keep_last=1, keep_every=None, keep_best=0),
        guards=replace(config.guards, rollback=False),
        logging=replace(config.logging, telemetry=0, tensorboard=False, wandb=wandb),
    )


def _last_error(log: str) -> str:
    """The last message for the user in the output of `train`."""
    lines = [line for line in log.splitlines() if line.startswith("error")]
    if not lines:
        lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1].partition(": ")[2] or lines[-1] if lines else ""


def compare(
    run: Run, again: Run, window: Window, config: Config, facts: Mapping[str, Any], exactness: Exactness
) -> Compared:
    """Compares the run's records of a window with a repeated training. facts: of the start that trained it."""
    compared = Compared(window)
    for name in FACTS:
        recorded, now = facts.get(name), again.facts.get(name)
        if recorded != now:
            of_data = name.endswith("_fingerprint")
            meaning = ": it was trained on other data, or with another tokenizer" if of_data else ""
            says = f"run.json says {name} {recorded}, training again {now}{meaning}"
            compared.found.append(Finding("data" if of_data else "run.json", says, None, name, recorded, now))
    of_run = {x["step"]: x for x in run.train if window.start < x["step"] <= window.end}
    of_again = {x["step"]: x for x in again.train if window.start < x["step"]}
    compared.train_records = _compare_records("train", of_run, of_again, exactness, compared)
    of_run, of_again = (_evals(of, window, config) for of in (run, again))
    killed = run.end is None and window.end >= max(x["step"] for x in [*run.train, *run.evals])
    if window.end not in of_run and (killed or not _validates(config, window.end)):
        of_again.pop(window.end, None)  # every training ends with a validation; the run went on, or was killed
    if window.start not in of_again:
        of_run.pop(
            window.start, None
        )  # of an earlier end of the run, which training from its checkpoint does not repeat
    compared.eval_records = _compare_records("eval", of_run, of_again, exactness, compared)
    for step in sorted(of_run.keys() & of_again.keys()):
        _compare_rows(run, again, step, exactness, compared)
    _compare_checkpoints(run, again, window.end, exactness, compared)
    compared.found += _divergence(run, again, window, config, exactness)
    return compared


def _divergence(run: Run, again: Run, window: Window, config: Config, exactness: Exactness) -> Iterator[Finding]:
    """A window at whose end the run is said to have diverged, and which ends well."""
    said, now = run.end or {}, again.end or {}
    # A run that goes back may diverge by losses alone, which a training that does not go back survives.
    is_judged = said.get("step") == window.end and exactness.to_the_bit and not config.guards.rollback
    if is_judged and said["code"] == DIVERGED and now.get("code") == 0:
        says = f"exit.json says that the run diverged at step {window.end}, training again does not"
        yield Finding("exit.json", says, window.end, "code", DIVERGED, 0)


def _evals(run: Run, window: Window, config: Config) -> dict[int, dict[str, Any]]:
    """The validations of a window, but those that have other rows where training ends (eval.budget)."""
    fewer = config.eval.budget is not None and window.end < config.train.steps
    last = window.end - 1 if fewer else window.end
    return {record["step"]: record for record in run.evals if window.start <= record["step"] <= last}


def _validates(config: Config, step: int) -> bool:
    return step >= config.train.steps or (config.eval.every > 0 and step % config.eval.every == 0)


def _compare_records(
    kind: str,
    of_run: Mapping[int, Mapping[str, Any]],
    of_again: Mapping[int, Mapping[str, Any]],
    exactness: Exactness,
    compared: Compared,
) -> int:
    """The number of records that both have; each field that differs is found."""
    for step in sorted(of_again.keys() - of_run.keys()):
        compared.found.append(Finding(METRICS, f"there is no {kind} record of step {step}", step))
    for step in sorted(of_run.keys() - of_again.keys()):
        says = f"there is a {kind} record of step {step}, which training again does not write"
        compared.found.append(Finding(METRICS, says, step))
    both = sorted(of_run.keys() & of_again.keys())
    for step in both:
        one, other = of_run[step], of_again[step]
        for name in dict.fromkeys([*one, *other]):
            if name in OF_THE_CLOCK or (name in JUMPS and not exactness.to_the_bit):
                continue
            if not _agree(one.get(name), other.get(name), exactness, compared):
                says = (
                    f"the {kind} record of step {step} says {name} {one.get(name)}; trained again it is "
                    f"{other.get(name)}"
                )
                compared.found.append(Finding(METRICS, says, step, name, one.get(name), other.get(name)))
    return len(both)


def _agree(one: Any, other: Any, exactness: Exactness, compared: Compared) -> bool:
    if not (type(one) is type(other) is float):
        return bool(one == other) and type(one) is type(other)
    if one == other or (math.isnan(one) and math.isnan(other)):  # of a step that was skipped
        return True
    compared.largest = max(compared.largest, abs(one - other) / max(abs(one), abs(other)))
    return not exactness.to_the_bit and math.isclose(one, other, rel_tol=exactness.tolerance)


def _compare_rows(run: Run, again: Run, step: int, exactness: Exactness, compared: Compared) -> None:
    """The losses of single rows; where the run has no such file, `records.py` says so."""
    for path in sorted((again.path / "evals").glob(f"step_{step:08d}*.npz")):
        try:
            one, other = read_rows(run.path / "evals" / path.name), read_rows(path)
        except DataError:
            continue
        same = one.rows_hash == other.rows_hash and np.array_equal(one.n_targets, other.n_targets)
        pairs = zip(one.loss_sum.tolist(), other.loss_sum.tolist(), strict=False)
        agree = [_agree(a, b, exactness, compared) for a, b in pairs]  # all of them, for the largest difference
        if not same or not all(agree):
            says = f"evals/{path.name} has other losses of rows than training again"
            compared.found.append(Finding(f"evals/{path.name}", says, step))


def _compare_checkpoints(run: Run, again: Run, step: int, exactness: Exactness, compared: Compared) -> None:
    """The weights, moments and counters at the end, where the run has kept them, by their checksums."""
    one, other = (of.path / "checkpoints" / f"step_{step:08d}" for of in (run, again))
    if not exactness.to_the_bit or not (one / "MANIFEST.json").is_file():
        return
    try:
        stored, now = read_manifest(one).files, read_manifest(other).files
        counters, counters_now = (
            {name: value for name, value in read_json(of / STATE).items() if name not in OF_THE_CLOCK}
            for of in (one, other)
        )
    except (DataError, AttributeError):
        return  # a damaged checkpoint is found without training
    compared.checkpoint = True
    tensors, tensors_now = ({x: entry for x, entry in files.items() if has_tensors(x)} for files in (stored, now))
    if tensors != tensors_now:
        says = f"the weights or moments of checkpoint {one.name} are not those that training again ends with"
        compared.found.append(Finding(one.name, says, step))
    for name in dict.fromkeys([*counters, *counters_now]):
        # The losses that guards.rollback looks back at are not kept by a training that does not go back.
        if name != "guards" and json.dumps(counters.get(name)) != json.dumps(counters_now.get(name)):
            says = f"{name} in state.json of checkpoint {one.name} is not what training again ends with"
            found = Finding(one.name, says, step, name, counters.get(name), counters_now.get(name))
            compared.found.append(found)
