"""Reads the runs for `compare` from directories of runs and studies, and refuses runs that cannot be compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.study.compare.compared_keys import value_of
from ngpt_train.study.compare.runs import Run, contradicted, n_bytes, read_run
from ngpt_train.study.definition import FILE, Study, name_of, read_stored
from ngpt_train.study.descent import read_phases
from ngpt_train.study.points import FAILURES, reason_of


@dataclass
class Gathered:
    """Runs and the settings of their comparison, from their study or the user.

    tuned: keys whose best value is taken for each arm and budget; None: optim.lr, unless nothing else differs. metric:
    None takes a metric in which all runs are comparable. failures: of points that left no run behind. descent:
    phases of the study's arms. interactions: names of four arms each.
    """

    runs: list[Run] = field(default_factory=list)
    arms: dict[str, list[Run]] | None = None
    overrides: Mapping[str, Sequence[str]] | None = None
    baseline: str | None = None
    tuned: Sequence[str] | None = None
    under_test: Sequence[str] = ()
    metric: str | None = None
    confidence: float = 0.95
    title: str = "comparison"
    failures: list[dict[str, Any]] = field(default_factory=list)
    descent: list[dict[str, Any]] = field(default_factory=list)
    interactions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gather(paths: Sequence[Path]) -> Gathered:
    """Raises DataError for a directory without a run, and for an unreadable run."""
    if len(paths) == 1 and (paths[0] / FILE).is_file():
        return of_study(read_stored(paths[0]))
    inside = [path for given in paths for place in (given / "runs", given) for path in sorted(place.glob("*"))]
    lost = [x for x in inside if (x / "metrics.jsonl").exists() and not (x / "config.yaml").exists()]
    found = Gathered(notes=[f"{path} is left out: it has records, but no config.yaml" for path in lost])
    seen = set()
    for path in [run for given in paths for run in _directories(given)]:
        if path.resolve() not in seen:
            found.runs.append(read_run(path))
        seen.add(path.resolve())
    if len(paths) == 1:
        found.title = paths[0].resolve().name
    check_evals(found.runs)
    return found


def _directories(path: Path) -> list[Path]:
    """The run directories of `path`: a run, a study, or a directory of runs."""
    if not path.is_dir():
        raise DataError(f"{path} is not a directory. Name run directories, such as runs/NAME, or a study's.")
    if (path / "config.yaml").is_file():
        return [path]
    for place in (path / "runs", path):
        inside = sorted(run for run in place.glob("*") if (run / "config.yaml").is_file())
        if inside:
            return inside
    raise DataError(f"{path} holds no run: a run's directory has a config.yaml. Name directories such as runs/NAME.")


def of_study(study: Study) -> Gathered:
    """The runs in the study's directory, by arm."""
    names = sorted(study.arms, key=len, reverse=True)  # gpt-qk before gpt

    def arm_of(run: str) -> str | None:
        return next((name for name in names if run.startswith(f"{name}-")), None)

    found = Gathered(overrides=study.arms, baseline=study.baseline, tuned=study.tuned_keys, title=study.name)
    found.metric, found.confidence, found.interactions = study.metric, study.confidence, study.interactions
    found.under_test = sorted({name_of(argument) for row in study.arms.values() for argument in row})
    found.commands, found.descent = [study.command], read_phases(study.path)
    paths = [path for path in sorted(study.runs.glob("*")) if arm_of(path.name) and (path / "config.yaml").is_file()]
    found.runs = list(map(read_run, paths))
    if not found.runs:
        raise DataError(f"{study.runs} holds no run of the study yet")
    found.arms = {name: [run for run in found.runs if arm_of(run.path.name) == name] for name in study.arms}
    check_evals(found.runs)
    for record in sorted((study.path / FAILURES).glob("*.json")):
        if (arm := arm_of(record.stem)) is not None:
            why = {"reason": reason_of(record), "run": str(study.runs / record.stem)}
            found.failures.append({"arm": arm, "budget": None, "seed": None, "values": {}, **why})
    return found


def check_evals(runs: Iterable[Run]) -> None:
    """Raises DataError if a validation contradicts the losses of its rows, or another validation of the same rows."""
    of_rows: dict[Any, tuple[int, Run, int]] = {}
    for run in runs:
        for record in run.evals:
            why = next((says for *_, says in contradicted(run, record)), "")
            loss, n, bits = (record.get(name) for name in ("loss", "n_targets", "bits_per_byte"))
            if not why and loss is not None and n and bits and record.get("rows_hash"):
                rows = (record["rows_hash"], run.facts.get("tokenizer_fingerprint"))
                text, other, step = of_rows.setdefault(rows, (n_bytes(loss * n, bits), run, record["step"]))
                if text != n_bytes(loss * n, bits):
                    why = f"the eval record of step {record['step']} says bits_per_byte {bits}, which is of another "
                    why += f"text than the record of step {step} of {other.path}, although their rows are the same"
            if why:
                where = run.path / "metrics.jsonl"
                raise DataError(f"{where}: {why}. Restore the file that is wrong, or leave it out.")


def check_comparable(runs: Iterable[Run]) -> str:
    """ "loss", or "bits_per_byte" for runs with different tokenizers. Raises DataError for other validation text."""
    validated = [run for run in runs if run.evals]
    validated = [run for run in validated if run.is_annealed] or validated
    if not validated:
        raise DataError("compare: no run has been validated: there is no eval record in any metrics.jsonl")
    first, *others = validated
    for run in others:
        if why := _why_not(first, run):
            problem = f"{run.path} cannot be compared with {first.path}: {why}"
            raise DataError(f"{problem}. Compare runs of one text and objective.")
    if not any(_other_tokenizer(first, run) for run in others):
        return "loss"
    for run in validated:
        if run.evals[-1].get("bits_per_byte") is None:
            problem = f"{run.path} has another tokenizer than others, so that a loss per token means something else"
            problem += ", and no bits_per_byte in its eval records"
            raise DataError(f"{problem}. Leave it out, or `evaluate` its checkpoint with this version.")
    return "bits_per_byte"


def _why_not(one: Run, other: Run) -> str:
    """The reason why the losses of two runs cannot be compared; empty if they can."""
    hashes = one.rows_hash, other.rows_hash
    if hashes[0] == hashes[1] is not None:
        return ""
    objectives = [value_of(run.config, "data.objective") for run in (one, other)]
    if objectives[0] != objectives[1]:
        return "one predicts the next token and the other continues the beginning of a document"
    if _other_tokenizer(one, other):
        return (text := _other_text(one, other)) and f"it was validated on other text, by {text}"
    if _differ(one, other, "data_fingerprint"):
        return f"it was validated on other text: rows_hash {hashes[1]} and {hashes[0]}, and other fingerprints of data"
    # Other rows of one text, and unknown rows, are a confound of `examine`.
    known = None not in (one.facts.get("data_fingerprint"), other.facts.get("data_fingerprint"))
    text = "" if known or None in hashes else _other_text(one, other)
    return text and f"it was validated on other text, by {text}: rows_hash {hashes[1]} and {hashes[0]}"


def _other_text(one: Run, other: Run) -> str:
    """The keys of the text that differ in two configs; empty if none does."""
    text = ("kind", "path", "repo", "revision", "split", "files", "mixture", "text_field", "val_fraction", "val_files")
    of_data = [key for key in {**one.config, **other.config} if key.startswith("data.")]
    keys = [key for key in of_data if key.removeprefix("data.") in text]
    return ", ".join(key for key in keys if value_of(one.config, key) != value_of(other.config, key))


def _other_tokenizer(one: Run, other: Run) -> bool:
    """True if the fingerprints differ. If one is unknown, the configs decide, unless the validation rows are equal."""
    fact = "tokenizer_fingerprint"
    if None not in (one.facts.get(fact), other.facts.get(fact)) or one.rows_hash == other.rows_hash is not None:
        return _differ(one, other, fact)
    keys = ("tokenizer.kind", "tokenizer.vocab_size")
    return any(value_of(one.config, key) != value_of(other.config, key) for key in keys)


def _differ(one: Run, other: Run, fact: str) -> bool:
    values = one.facts.get(fact), other.facts.get(fact)
    return None not in values and values[0] != values[1]
