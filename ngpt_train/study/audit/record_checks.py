"""Checks of a run's records that need no training: their order, and that they agree with each other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import mixture_of
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines
from ngpt_train.optim.schedule import lr_at
from ngpt_train.study.audit.certificate import Finding
from ngpt_train.study.compare.runs import Run, contradicted
from ngpt_train.study.points import ENDED

METRICS = "metrics.jsonl"
KINDS = ("train", "eval")  # in the order in which a step writes its records
MOST_FINDINGS = 1000  # a step of 10**18 leaves as many without a record
SAME = 1e-12  # relative: the same sums in fp64, in another order or by another processor
Record = Mapping[str, Any]


def check_records(
    run: Run, config: Config, starts: Sequence[int], checkpoints: Sequence[int], exact: bool
) -> list[Finding]:
    """Contradictions in metrics.jsonl and evals/.

    config: of the last start. starts: the steps at which the starts of the run began. checkpoints: the steps of those
    that are kept. exact: whether this is the kind of machine that the run was computed on; else the last digits of what
    is computed here may be others.
    """
    found = chain(
        _order(run.path / METRICS),
        _missing(run, config, starts, checkpoints),
        chain.from_iterable(_train_record(record, config) for record in run.train),
        _schedule(run, config, starts, 0.0 if exact else SAME),
        _cumulative(run),
        chain.from_iterable(_eval_record(run, record) for record in run.evals),
        _files_without_records(run),
    )
    return list(islice(found, MOST_FINDINGS))


def _order(path: Path) -> Iterator[Finding]:
    """Records stand in the order of their steps, each once and as JsonlSink writes them; a line that is no record
    stands nowhere but at the end."""
    before = (-1, 0)
    broken = 0
    for number, (line, record) in enumerate(json_lines(path), start=1):
        if broken:
            yield Finding(METRICS, f"line {broken} is no record")
        broken = number if record is None else 0
        if record is not None and line != (json.dumps(record) + "\n").encode():
            # A 17th digit, for example, that the number does not have.
            says = f"line {number} ({record.get('kind')}, step {record.get('step')}) is not as the program writes it"
            yield Finding(METRICS, f"{says}: it was edited", record.get("step"))
        if record is None or record.get("kind") not in KINDS:
            continue
        kind, step = record["kind"], record["step"]
        here = (step, KINDS.index(kind))
        if here <= before:
            problem = "is there twice" if here == before else "stands after a later one"
            yield Finding(METRICS, f"line {number}: the {kind} record of step {step} {problem}", step)
        before = max(before, here)


def _missing(run: Run, config: Config, starts: Sequence[int], checkpoints: Sequence[int]) -> Iterator[Finding]:
    """Steps that must have a record. logging.every and eval.every may have been others before the last start."""
    ended = run.end is not None and run.end["code"] == 0
    of_end = [run.end["step"]] if run.end is not None and ended else []
    last = max([*(x["step"] for x in [*run.train, *run.evals]), *checkpoints, *of_end], default=0)
    if of_end and of_end[0] < last:
        says = f"exit.json says that the run ended at step {of_end[0]}, and there are records of step {last}"
        yield Finding("exit.json", says, of_end[0])
    planned = config.train.stop_at or config.train.steps
    if run.end is not None and run.end["reason"] == ENDED and run.end["step"] < planned:
        says = f"exit.json says that the run reached its planned end at step {run.end['step']}, which is {planned}"
        yield Finding("exit.json", says, run.end["step"], "reason", ENDED)
    begun, every = max(starts, default=0), config.logging.every
    there = {kind: {x["step"] for x in records} for kind, records in (("train", run.train), ("eval", run.evals))}
    known, of_eval = there["train"], config.eval.every or last + 1
    gaps = sorted(step + every for step in known if step + every <= begun and step + 2 * every in known)
    of_end = [last] if last >= config.train.steps and last % of_eval else []
    expected = {
        "train": chain(gaps, range(begun // every * every + every, last + 1, every)),
        "eval": chain(range(begun and begun // of_eval * of_eval + of_eval, last + 1, of_eval), of_end),
    }
    for kind, steps in expected.items():
        for step in steps:
            # A run that did not end may have been killed before the validation of its last step.
            if step not in there[kind] and (kind == "train" or ended or step < last):
                yield Finding(METRICS, f"there is no {kind} record of step {step}", step)


def _train_record(record: Record, config: Config) -> Iterator[Finding]:
    step = record["step"]
    if config.logging.every == 1 and not record.get("skipped") and record.get("loss_mean") is not None:
        loss, mean = record.get("loss"), record["loss_mean"]
        if loss is None or not math.isclose(loss, mean, rel_tol=SAME):
            says = f"the train record of step {step} says loss {loss} and loss_mean {mean}, which are of this one step"
            yield Finding(METRICS, says, step, "loss", loss, mean)
    if config.data.pack == "concat" and config.data.objective == "next_token":
        tokens, most = record.get("tokens"), step * config.train.rows_per_step * config.model.context
        if tokens is None or not most - _not_counted(record, config) <= tokens <= most:
            says = f"the train record of step {step} says tokens {tokens}, but it has {most}"
            yield Finding(METRICS, says, step, "tokens", tokens, most)


def _not_counted(record: Record, config: Config) -> int:
    """Targets at most that the steps so far have not counted: the last row of prepared text repeats a part of the one
    before, once in each epoch of each source."""
    data = config.data
    sources = [source.data for source in mixture_of(data)] if data.kind == "mixture" else [data]
    n_prepared = sum(not source.streamed for source in sources)
    return n_prepared * (config.model.context - 1) * math.ceil(record.get("epochs") or 1)


def _schedule(run: Run, config: Config, starts: Sequence[int], close: float) -> Iterator[Finding]:
    """The learning rate is a function of the config and the step, to the bit.

    Before the last start train.steps may have been smaller: where no rate there is the config's, none is judged.
    """
    begun = max(starts, default=0)
    for part in ([x for x in run.train if x["step"] <= begun], [x for x in run.train if x["step"] > begun]):
        peak, steps = float(config.optim.lr), config.train.steps
        rates = {x["step"]: lr_at(x["step"] - 1, config.schedule, peak, steps) for x in part}
        wrong = [x for x in part if not _close(x.get("lr"), rates[x["step"]], close)]
        if part and part[-1]["step"] <= begun and len(wrong) == len(part):
            continue
        for record in wrong:
            step, lr = record["step"], record.get("lr")
            says = f"the train record of step {step} says lr {lr}, the config's schedule gives {rates[step]}"
            yield Finding(METRICS, says, step, "lr", lr, rates[step])


def _cumulative(run: Run) -> Iterator[Finding]:
    """FLOPs and tokens grow with the steps, seconds do not fall."""
    records = sorted([*run.train, *run.evals], key=lambda x: (x["step"], KINDS.index(x["kind"])))
    rate = next((x["flops"] / x["step"] for x in reversed(records) if x["step"] and x.get("flops") is not None), None)
    before: dict[str, float] = {}
    for record in records:
        step = record["step"]
        if rate is not None and record.get("flops") is not None and record["flops"] != round(rate * step):
            says = f"the {record['kind']} record of step {step} says flops {record['flops']}, others {rate:.6g} a step"
            yield Finding(METRICS, says, step, "flops", record["flops"], round(rate * step))
        for name in ("tokens", "train_seconds"):
            if (value := record.get(name)) is not None:
                if value < before.get(name, 0):
                    says = f"the {record['kind']} record of step {step} says {name} {value}, after {before[name]}"
                    yield Finding(METRICS, says, step, name, value, before[name])
                before[name] = value


def _eval_record(run: Run, record: Record) -> Iterator[Finding]:
    """A validation says what the losses of its rows add up to."""
    step, there = record["step"], run.path / "evals"
    try:
        for name, recorded, value, says in contradicted(run, record):
            yield Finding(METRICS, says, step, name, recorded, value)
    except DataError as error:
        yield Finding("evals", str(error), step)
    if not (there / f"step_{step:08d}.npz").exists() and any(there.glob("step_*.npz")):
        yield Finding("evals", f"the losses of the rows at step {step} are missing", step)


def _files_without_records(run: Run) -> Iterator[Finding]:
    recorded = {x["step"] for x in run.evals}
    for path in sorted((run.path / "evals").glob("step_*.npz")):
        number = path.stem.removeprefix("step_").partition("_")[0]
        if number.isdigit() and int(number) not in recorded:
            yield Finding(METRICS, f"there is no eval record of step {int(number)}, but {path.name}", int(number))


def _close(one: Any, other: Any, relative: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=relative)
    return bool(one == other)
