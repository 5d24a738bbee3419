"""Checks without training: the records of a run against each other, its config, its checkpoints and exit.json."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import TABLES
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import sources_of
from ngpt_train.config.stored import read_yaml, to_dict, what_differs
from ngpt_train.config.validate import flatten, show
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, read_json
from ngpt_train.optim.schedule import lr_at
from ngpt_train.study.audit.certificate import METRICS, Finding, contradiction
from ngpt_train.study.compare.runs import Run, contradicted
from ngpt_train.study.points import ENDED
from ngpt_train.training.checkpoint import catalogue

KINDS = ("train", "eval")  # in the order in which a step writes its records
MOST_FINDINGS = 1000  # a record of step 10**18 leaves as many steps without a record
SAME = 1e-12  # relative tolerance of equal sums in fp64, added in another order or by another processor


def check_records(run: Run, config: Config, begun: int, checkpoints: Sequence[int], exact: bool) -> list[Finding]:
    """Contradictions in metrics.jsonl and evals/. config: of the last start, which began at step `begun`. checkpoints:
    the steps of the kept ones. exact: False on another kind of machine, whose last digits may differ."""
    found = chain(
        _order(run.path / METRICS),
        _end(run, config, checkpoints),
        _missing(run, config, begun, checkpoints),
        _sums(run, config),
        _schedule(run, config, begun, 0.0 if exact else SAME),
        _cumulative(run),
        _evals(run),
    )
    return list(islice(found, MOST_FINDINGS))


def _order(path: Path) -> Iterator[Finding]:
    """Records stand in the order of their steps, each once, as the program writes it. The last line may be damaged."""
    before, broken = (-1, 0), 0
    for number, (line, record) in enumerate(json_lines(path), start=1):
        if broken:
            yield Finding(METRICS, f"line {broken} is no record")
        broken = number if record is None else 0
        if record is None:
            continue
        kind, step = record.get("kind"), record.get("step")
        if line != (json.dumps(record) + "\n").encode():  # an added digit, for example, beyond fp64
            says = f"line {number} ({kind}, step {step}) is not as the program writes it: it was edited"
            yield Finding(METRICS, says, step)
        if kind in KINDS:
            if (here := (step, KINDS.index(kind))) <= before:
                problem = "is there twice" if here == before else "stands after a later one"
                yield Finding(METRICS, f"line {number}: the {kind} record of step {step} {problem}", step)
            before = max(before, here)


def last_step(run: Run) -> int:
    return max((record["step"] for record in [*run.train, *run.evals]), default=0)


def _end(run: Run, config: Config, checkpoints: Sequence[int]) -> Iterator[Finding]:
    if run.end is None:
        return
    step, last = run.end["step"], max([last_step(run), *checkpoints])
    planned = config.train.stop_at or config.train.steps
    if run.end["code"] == 0 and step < last:
        says = f"exit.json says that the run ended at step {step}, and there are records of step {last}"
        yield Finding("exit.json", says, step)
    if run.end["reason"] == ENDED and step < planned:
        says = f"exit.json says that the run reached its planned end at step {step}, which is {planned}"
        yield Finding("exit.json", says, step, "reason", ENDED)


def _missing(run: Run, config: Config, begun: int, checkpoints: Sequence[int]) -> Iterator[Finding]:
    """Steps without the record that they must have. Before the last start logging.every and eval.every may differ."""
    ended = run.end is not None and run.end["code"] == 0
    last = max([last_step(run), *checkpoints, *([run.end["step"]] if run.end is not None and ended else [])])
    there = {kind: {x["step"] for x in records} for kind, records in (("train", run.train), ("eval", run.evals))}
    every, every_eval, known = config.logging.every, config.eval.every or last + 1, there["train"]
    gaps = sorted(step + every for step in known if step + every <= begun and step + 2 * every in known)
    at_end = [last] if last >= config.train.steps and last % every_eval else []
    expected = {
        "train": chain(gaps, range(begun // every * every + every, last + 1, every)),
        "eval": chain(range(begun and begun // every_eval * every_eval + every_eval, last + 1, every_eval), at_end),
    }
    for kind, steps in expected.items():
        for step in steps:
            # A kill may come between the last step and its validation.
            if step not in there[kind] and (kind == "train" or ended or step < last):
                yield Finding(METRICS, f"there is no {kind} record of step {step}", step)


def _sums(run: Run, config: Config) -> Iterator[Finding]:
    """A loss is the mean of its steps; tokens are the targets of the steps."""
    counts = config.data.pack == "concat" and config.data.objective == "next_token"
    repeated = _repeated_targets(config) if counts else 0
    for record in run.train:
        loss, mean = record.get("loss"), record.get("loss_mean")
        is_one_step = config.logging.every == 1 and not record.get("skipped")
        if is_one_step and mean is not None and (loss is None or not math.isclose(loss, mean, rel_tol=SAME)):
            yield contradiction(record, "loss", "its loss_mean of this single step is", mean)
        most, tokens = record["step"] * config.train.rows_per_step * config.model.context, record.get("tokens")
        least = most - repeated * math.ceil(record.get("epochs") or 1)
        if counts and (tokens is None or not least <= tokens <= most):
            yield contradiction(record, "tokens", "the steps so far have", most)


def _repeated_targets(config: Config) -> int:
    """Targets of an epoch that do not count: the last row of prepared text repeats some of the row before it."""
    return sum(not source.data.streamed for source in sources_of(config.data)) * (config.model.context - 1)


def _schedule(run: Run, config: Config, begun: int, tolerance: float) -> Iterator[Finding]:
    """The learning rate is a function of config and step. Before the last start train.steps may have been smaller: if
    no rate there is the config's, none is judged."""
    for part in ([x for x in run.train if x["step"] <= begun], [x for x in run.train if x["step"] > begun]):
        rates = [lr_at(x["step"] - 1, config.schedule, float(config.optim.lr), config.train.steps) for x in part]
        wrong = [(x, lr) for x, lr in zip(part, rates, strict=True) if not _close(x.get("lr"), lr, tolerance)]
        if part and part[-1]["step"] <= begun and len(wrong) == len(part):
            continue
        for record, lr in wrong:
            yield contradiction(record, "lr", "the config's schedule gives", lr)


def _close(one: Any, other: float, tolerance: float) -> bool:
    return one == other or (isinstance(one, float) and math.isclose(one, other, rel_tol=tolerance))


def _cumulative(run: Run) -> Iterator[Finding]:
    """FLOPs are proportional to the steps; tokens and seconds do not fall."""
    records = sorted([*run.train, *run.evals], key=lambda x: (x["step"], KINDS.index(x["kind"])))
    rate = next((x["flops"] / x["step"] for x in reversed(records) if x["step"] and x.get("flops") is not None), None)
    before: dict[str, float] = {}
    for record in records:
        flops = None if rate is None else round(rate * record["step"])
        if None not in (flops, record.get("flops")) and record["flops"] != flops:
            yield contradiction(record, "flops", f"at {rate:.6g} a step, as in the last record, it has", flops)
        for name in ("tokens", "train_seconds"):
            if (value := record.get(name)) is not None:
                if value < before.get(name, 0):
                    yield contradiction(record, name, "an earlier record", before[name])
                before[name] = value


def _evals(run: Run) -> Iterator[Finding]:
    """Each validation has a file with the losses of its rows, which add up to its record."""
    recorded, files = {x["step"] for x in run.evals}, sorted((run.path / "evals").glob("step_*.npz"))
    for record in run.evals:
        step = record["step"]
        try:
            for name, value, given, says in contradicted(run, record):
                yield Finding(METRICS, says, step, name, value, given)
        except DataError as error:
            yield Finding("evals", str(error), step)
        if files and not (run.path / f"evals/step_{step:08d}.npz").exists():
            yield Finding("evals", f"the losses of the rows at step {step} are missing", step)
    for path in files:
        number = path.stem.removeprefix("step_").partition("_")[0]
        if number.isdigit() and int(number) not in recorded:
            yield Finding(METRICS, f"there is no eval record of step {int(number)}, but {path.name}", int(number))


def check_checkpoint(
    path: Path, run: Run, config: Config, newest: bool, validation_losses: Mapping[int, float]
) -> tuple[Config | None, list[Finding]]:
    """The config of a kept checkpoint, None if the checkpoint is damaged; its contradictions with records and
    config.yaml. validation_losses: of the run, by step (validation.json)."""
    step, name = catalogue.step_of(path), path.name
    try:
        problems = catalogue.differences(path, catalogue.read_manifest(path))
        progress, stored = catalogue.read_progress(path), read_yaml(path / "config.yaml")
    except DataError as error:
        problems = [str(error)]
    if problems:
        return None, [Finding(name, f"checkpoint {name}: {'; '.join(problems)}", step)]
    found = []
    allowed = {x.get("key") for start in run.starts for x in start.get("changed") or []}
    last_start = max(start.get("step", 0) for start in run.starts)
    if newest and step > last_start and (path / "config.yaml").read_bytes() != (run.path / "config.yaml").read_bytes():
        then, now = (dict(flatten(to_dict(each), TABLES)) for each in (stored, config))
        differing = [(key, old, now[key]) for key, old in then.items() if old != now[key]]
        differing, allowed = differing or [("its text", "another", "")], set()
    else:
        differing = what_differs(stored, config)
    for key, old, new in differing:
        if key not in allowed:
            says = f"config.yaml says {key}={show(new)}, checkpoint {name} was trained with {show(old)}"
            found.append(Finding("config.yaml", says, step, key, new, old))
    if config.eval.budget is not None:  # the last record is of more rows than the loss that is compared
        validation_losses = {}
    for records, field, file, value in (
        (run.train, "loss", catalogue.MANIFEST, read_json(path / catalogue.MANIFEST).get("loss")),
        (run.train, "tokens", catalogue.STATE, progress["tokens"]),
        (run.train, "data_hash", catalogue.STATE, progress["data"].get("data_hash")),
        (run.evals, "loss", catalogue.VALIDATION, validation_losses.get(step)),
    ):
        record: Mapping[str, Any] = next((x for x in records if x["step"] == step), {})
        if value is not None and field in record and record[field] != value:
            found.append(contradiction(record, field, f"checkpoint {name} ({file})", value))
    return stored, found
