"""What the records of a run must satisfy without training: their order, and what they say of each other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines
from ngpt_train.optim.schedule import lr_at
from ngpt_train.study.audit.certificate import Finding
from ngpt_train.study.compare.runs import Run
from ngpt_train.study.points import ENDED

METRICS = "metrics.jsonl"
KINDS = ("train", "eval")  # in the order in which a step writes its records
SAME = 1e-12  # relative: the same sums in fp64, in another order or by another processor
Record = Mapping[str, Any]


def check_records(
    run: Run, config: Config, starts: Sequence[int], checkpoints: Sequence[int], exact: bool
) -> list[Finding]:
    """What cannot be true of metrics.jsonl and evals/.

    config: of the last start. starts: the steps at which the starts of the run began. checkpoints: the steps of those
    that are kept. exact: whether this is the kind of machine that the run was computed on; else the last digits of what
    is computed here may be others.
    """
    close = 0.0 if exact else SAME
    found = list(_order(run.path / METRICS))
    found += _missing(run, config, starts, checkpoints)
    for record in run.train:
        found += _train_record(record, config)
    found += _schedule(run, config, starts, close)
    found += _cumulative(run)
    for record in run.evals:
        found += _eval_record(run, record, close)
    found += _files_without_records(run)
    return found


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
        kind, step = record["kind"], record.get("step")
        if type(step) is not int:
            yield Finding(METRICS, f"line {number}: the {kind} record has no step")
            continue
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
    expected = {"train": set(range(every, last + 1, every)), "eval": {0}}
    if config.eval.every:
        expected["eval"] |= set(range(0, last + 1, config.eval.every))
    if last >= config.train.steps:
        expected["eval"].add(last)
    if not ended:  # it may have been killed before the validation of its last step
        expected["eval"].discard(last)
    for kind, steps in expected.items():
        for step in sorted(steps - there[kind]):
            earlier = begun > 0 and step <= begun
            if not earlier or (kind == "train" and {step - every, step + every} <= there[kind]):
                yield Finding(METRICS, f"there is no {kind} record of step {step}", step)


def _train_record(record: Record, config: Config) -> Iterator[Finding]:
    step = record["step"]
    if config.logging.every == 1 and not record.get("skipped") and _is_number(record.get("loss_mean")):
        loss, mean = record.get("loss"), record["loss_mean"]
        if not _is_number(loss) or not math.isclose(loss, mean, rel_tol=SAME):
            says = f"the train record of step {step} says loss {loss} and loss_mean {mean}, which are of this one step"
            yield Finding(METRICS, says, step, "loss", loss, mean)
    per_step = config.train.rows_per_step * config.model.context
    whole = config.data.pack == "concat" and config.data.objective == "next_token"
    if whole and record.get("tokens") != step * per_step:
        says = f"the train record of step {step} says tokens {record.get('tokens')}, but it has {step * per_step}"
        yield Finding(METRICS, says, step, "tokens", record.get("tokens"), step * per_step)


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
    rate = next((x["flops"] / x["step"] for x in reversed(records) if x["step"] and _is_number(x.get("flops"))), None)
    before: dict[str, float] = {}
    for record in records:
        step = record["step"]
        if rate is not None and _is_number(record.get("flops")) and record["flops"] != round(rate * step):
            says = f"the {record['kind']} record of step {step} says flops {record['flops']}, others {rate:.6g} a step"
            yield Finding(METRICS, says, step, "flops", record["flops"], round(rate * step))
        for name in ("tokens", "train_seconds"):
            if _is_number(value := record.get(name)):
                if value < before.get(name, 0):
                    says = f"the {record['kind']} record of step {step} says {name} {value}, after {before[name]}"
                    yield Finding(METRICS, says, step, name, value, before[name])
                before[name] = value


def _eval_record(run: Run, record: Record, close: float) -> Iterator[Finding]:
    """A validation says what the losses of its rows add up to."""
    step, loss = record["step"], record.get("loss")
    if not _is_number(loss):
        return
    expected: dict[str, Any] = {"ppl": math.exp(min(loss, 700))}
    try:
        rows = run.rows_at(step)
    except DataError as error:
        yield Finding("evals", str(error), step)
        rows = None
    if rows is not None:
        n = int(rows.n_targets.sum())
        expected |= {"loss": float(rows.loss_sum.sum()) / n, "n_targets": n, "rows": len(rows.loss_sum)}
        expected |= {"rows_hash": rows.rows_hash}
    elif (run.path / "evals").is_dir() and any((run.path / "evals").glob("step_*.npz")):
        yield Finding("evals", f"the losses of the rows at step {step} are missing", step)
    bits, n_targets = record.get("bits_per_byte"), record.get("n_targets")
    if _is_number(bits) and bits and isinstance(n_targets, int):
        total = expected.get("loss", loss) * n_targets / math.log(2)
        expected["bits_per_byte"] = total / max(1, round(total / bits))  # a text has a whole number of bytes
    for name, value in expected.items():
        # bits_per_byte divides the sum of the losses, which `loss` has with a rounding more.
        if name in record and not _close(record[name], value, 1e-14 if name == "bits_per_byte" else close):
            says = f"the eval record of step {step} says {name} {record[name]}, its rows give {value}"
            yield Finding(METRICS, says, step, name, record[name], value)


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


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def losses_of(path: Path) -> dict[str, Any]:
    """The arrays of a file of evals/, as lists. Raises OSError, ValueError or KeyError."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name].tolist() for name in ("loss_sum", "n_targets", "rows_hash")}
