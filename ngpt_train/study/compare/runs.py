"""Runs, read from config.yaml, run.json, metrics.jsonl, exit.json and evals/ of their directories."""

import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ngpt_train.config.keys import AUTO, TABLES
from ngpt_train.config.stored import GONE
from ngpt_train.config.validate import flatten, show
from ngpt_train.core import recorded
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, parse_json, read_whole, yaml_tree
from ngpt_train.core.recorded import ABOVE_0, ANSWERS, COUNT, FLAG, POSITIVE, TEXT, Record
from ngpt_train.study.definition import SAME_BUDGET

# Checked keys of a config, which count and group runs. All others are only compared and shown.
KEYS = {
    **{"train.steps": POSITIVE, "run.seed": COUNT, "run.name": TEXT, "optim.lr": ABOVE_0},
    **{"train.batch_rows": POSITIVE, "train.batch_tokens": POSITIVE},
    **{"scale.name": TEXT, "model.name": TEXT, "model.tied_embeddings": FLAG},
    **dict.fromkeys(("model.context", "model.d_model", "model.n_layers", "model.vocab_size"), POSITIVE),
}

# Facts of a start in run.json that say nothing about its computation.
OF_THE_START = ("time", "step", "job", "kernels", "damaged", "changed", "n_params", "init", "host")
# Bounds of a file in evals/, which holds the loss of each validation row.
MOST_BYTES = 1 << 26  # of a file: 4 million rows
MOST_TARGETS = 1 << 40  # of a row; their sum fits int64
MOST_LOSS = 2.0**129 * MOST_TARGETS  # of a row; the loss of a target comes from fp32 logits
ARRAYS = {"loss_sum": "<f8", "n_targets": "<i8", "rows_hash": "<U"}


@dataclass(frozen=True)
class Rows:
    """The loss of each fixed validation row after a step."""

    loss_sum: np.ndarray  # (R,) fp64, nats
    n_targets: np.ndarray  # (R,) int64
    rows_hash: str  # identifies the rows


def read_rows(path: Path) -> Rows:
    """The rows of a file. It must not be compressed, so it takes no more memory than its size. Raises DataError."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_whole(path, MOST_BYTES))) as archive:
            members = archive.infolist()
            if sorted(member.filename for member in members) != [f"{name}.npy" for name in ARRAYS]:
                raise ValueError("other arrays")
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("it is compressed")
            found = {name: _array(archive.read(f"{name}.npy"), kind) for name, kind in ARRAYS.items()}
        rows = Rows(found["loss_sum"], found["n_targets"], str(found["rows_hash"][0]))
        if len(rows.loss_sum) != len(rows.n_targets):
            raise ValueError("loss_sum and n_targets are not of the same rows")
        if rows.n_targets.min() < 0 or not 0 < rows.n_targets.max() < MOST_TARGETS:
            raise ValueError("its numbers of targets cannot be")
        ends = rows.loss_sum[np.isfinite(rows.loss_sum)]  # a diverged run has NaN and infinite losses
        if (rows.loss_sum < 0).any() or (ends > MOST_LOSS).any():
            raise ValueError("its losses cannot be")
    except (OSError, ValueError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile) as error:
        why = getattr(error, "strerror", None) or str(error)
        problem = f"{path} is damaged, or is not as the program writes it: {why}"
        raise DataError(f"{problem}. Leave this run out, or evaluate its checkpoint again.") from None
    return rows


def _array(content: bytes, kind: str) -> np.ndarray:
    """The numbers of a .npy file, `(n,)`, or its single text, `(1,)`. The header may lie, so it must equal numpy's
    header for the content. Raises ValueError."""
    start = 10 + int.from_bytes(content[8:10], "little")
    is_text = kind == "<U"
    dtype = np.dtype(f"<U{(len(content) - start) // 4}" if is_text else kind)
    values = np.frombuffer(content, dtype, offset=start)
    header = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {() if is_text else values.shape}, }}"
    if content[:8] != np.lib.format.magic(1, 0) or content[10:start].strip() != header.encode():
        raise ValueError("the header of an array is not of its content")
    return values


def contradictions(record: Mapping[str, Any], rows: Rows | None) -> Iterator[tuple[str, Any, Any]]:
    """(metric, recorded value, computed value) for each contradiction of an eval record with its rows, or without rows
    with its other metrics. Equal means to the bit: numpy adds in the same order everywhere. Only exp may differ in its
    last digit."""
    expected: dict[str, Any] = {}
    loss, n_targets, bits = record.get("loss"), record.get("n_targets"), record.get("bits_per_byte")
    total = None if loss is None or n_targets is None else loss * n_targets
    if rows is not None:
        total, n_targets = float(rows.loss_sum.sum()), int(rows.n_targets.sum())
        loss = total / n_targets
        expected = {"loss": loss, "n_targets": n_targets, "rows": len(rows.loss_sum), "rows_hash": rows.rows_hash}
    if loss is not None:
        expected["ppl"] = math.exp(min(loss, 700.0))
    if total is not None and bits:
        expected["bits_per_byte"] = total / math.log(2) / max(1, n_bytes(total, bits)) if math.isfinite(total) else None
    close = {"ppl": 1e-14, "bits_per_byte": 0.0 if rows else 1e-14}
    # Records have null for numbers that are not finite.
    endless = [name for name, value in expected.items() if isinstance(value, float) and not math.isfinite(value)]
    expected |= dict.fromkeys(endless)
    for name, value in expected.items():
        if name in record and record[name] != value:
            floats = type(record[name]) is type(value) is float
            if not (floats and math.isclose(record[name], value, rel_tol=close.get(name, 0.0))):
                yield name, record[name], value


def n_bytes(total: float, bits: float) -> int:
    """Bytes of the text of all targets, whose losses sum to `total`."""
    return round(min(total / math.log(2) / bits, 2.0**53))


@dataclass(frozen=True)
class Run:
    """A run directory. core/recorded.py has checked the fields of records, starts and end; unknown ones are None."""

    path: Path
    config: Mapping[str, Any]  # by dotted key; a config.yaml of an older version lacks keys
    starts: list[Record]  # run.json: git_commit, versions, device, world_size, n_params, ...
    rollbacks: list[Record]  # run.json
    train: list[Record]  # metrics.jsonl, kind train, by step
    evals: list[Record]  # metrics.jsonl, kind eval, by step
    end: Record | None  # exit.json: code, reason, step; None before the run ends by itself
    damaged: int = 0  # lines of metrics.jsonl that are no records, after a kill for example

    @property
    def facts(self) -> Record:
        """The newest start."""
        return self.starts[-1] if self.starts else {}

    @property
    def seed(self) -> int:
        """run.seed; without one, the seed in the name of the directory, or 0."""
        found = re.search(r"seed[-_]?(\d+)", self.path.name)
        return int(self.config.get("run.seed", found[1] if found else 0))

    @property
    def steps(self) -> int:
        """Steps of the schedule, which anneals the learning rate at its end."""
        return int(self.config["train.steps"])

    @property
    def is_annealed(self) -> bool:
        """True if the run was validated at the end of its schedule."""
        return bool(self.evals) and self.evals[-1]["step"] == self.steps

    @property
    def n_params(self) -> int | None:
        return self.facts.get("n_params")

    @property
    def n_params_without_embeddings(self) -> int | None:
        """Parameters without the embeddings of input, output and an encoder-decoder's source."""
        size, width = self.config.get("model.vocab_size"), self.config.get("model.d_model")
        if self.n_params is None or not isinstance(size, int) or not isinstance(width, int):
            return None
        matrices = 1 + (not self.config.get("model.tied_embeddings", False)) + ("model.source_context" in self.config)
        return self.n_params - matrices * size * width

    @property
    def tokens_per_step(self) -> int | None:
        """Targets of a step over all ranks, padding included."""
        rows, context = self.config.get("train.batch_rows"), self.config.get("model.context")
        if isinstance(rows, int) and isinstance(context, int):
            return rows * context
        tokens = self.config.get("train.batch_tokens")
        return tokens if isinstance(tokens, int) else None

    def _last_known(self, *names: str) -> Any:
        """These fields of the last record that has them all, above 0; None without one."""
        known = ([record.get(name) for name in names] for record in reversed([*self.train, *self.evals]))
        return next((values for values in known if all(values)), None)

    @property
    def flops_per_token(self) -> float | None:
        """From the last record: FLOPs so far over the tokens of its steps."""
        found = self._last_known("flops", "step")
        return float(round(found[0] / (found[1] * self.tokens_per_step))) if found and self.tokens_per_step else None

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds in steps, by the run's own clock."""
        found = self._last_known("train_seconds", "tokens")
        return float(found[0] / found[1]) if found else None

    @property
    def clipped_share(self) -> float | None:
        """Share of the steps with a clipped gradient, 0 without clipping; None if no record says it."""
        shares = [record["clipped"] or 0.0 for record in self.train if "clipped" in record]
        return sum(shares) / len(shares) if shares else None

    @property
    def budget(self) -> float:
        """Tokens of the schedule: steps times tokens per step of the config. The count of the records replaces it if
        the config does not say it, or if both differ by a quarter."""
        counted, per_step = self._counted(), self.tokens_per_step
        planned = None if per_step is None else self.steps * per_step
        if counted is None:
            return float(planned or self.steps)
        return float(planned) if planned and 0.8 < counted / planned < 1.25 else counted

    def _counted(self) -> float | None:
        """The targets of the whole schedule, by the count of the last record."""
        found = self._last_known("tokens", "step")
        return float(found[0]) * self.steps / found[1] if found else None

    @property
    def rows_hash(self) -> str | None:
        """Identifies the rows of the last validation."""
        found = self.evals[-1].get("rows_hash") if self.evals else None
        return self.rows.rows_hash if found is None and self.rows is not None else found

    @cached_property
    def data_hashes(self) -> dict[int, str]:
        """data_hashes[tokens]: identifies the rows read up to there."""
        known = [x for x in self.train if x.get("tokens") is not None and x.get("data_hash")]
        return {x["tokens"]: x["data_hash"] for x in known}

    @cached_property
    def facts_by_name(self) -> dict[str, list[Any]]:
        """The distinct values of code, versions, machine and data, over all starts."""
        found: dict[str, list[Any]] = {}
        # A start does not count if a later one took all of its steps again.
        steps = [*(start.get("step") or 0 for start in self.starts), math.inf]
        starts = [start for k, start in enumerate(self.starts) if steps[k + 1] > steps[k]]
        for start in starts:
            flat = {name: value for name, value in start.items() if name not in OF_THE_START}
            flat |= {f"versions.{name}": version for name, version in (flat.pop("versions", None) or {}).items()}
            for name, value in flat.items():
                if value not in found.setdefault(name, []):
                    found[name].append(value)
        changes = [change for start in starts for change in start.get("changed") or []]
        found["allowed_changes"] = [sorted({str(change.get("key")) for change in changes})]
        found["rollbacks"] = [len(self.rollbacks)]
        return found

    @cached_property
    def rows(self) -> Rows | None:
        """The rows of the last validation; None without a file. Raises DataError if the file is damaged."""
        return self.rows_at(self.evals[-1]["step"]) if self.evals else None

    @cached_property
    def wrong_answers(self) -> Rows | None:
        """Like `rows`, with 1 for a wrong answer in the place of the loss; None without answers."""
        if self.rows is None or not (path := self.path / rows_file(self.evals[-1]["step"], ending=ANSWERS)).exists():
            return None
        wrong = [x["label"] != x["answer"] for _, x in json_lines(path) if x and {"label", "answer"} <= x.keys()]
        if len(wrong) != len(self.rows.loss_sum):
            raise DataError(f"{path} is damaged: it has not one answer for each row. Leave this run out.")
        return Rows(np.array(wrong, float), np.ones(len(wrong), np.int64), self.rows.rows_hash)

    def rows_at(self, step: int, of: str = "") -> Rows | None:
        path = self.path / rows_file(step, of)
        return read_rows(path) if path.exists() else None


def rows_file(step: int, of: str = "", ending: str = ".npz") -> str:
    return f"evals/step_{step:08d}{of}{ending}"


def read_run(path: Path) -> Run:
    """The run in the directory `path`. Raises DataError for another directory and for unreadable files."""
    if not (path / "config.yaml").is_file():
        raise DataError(f"{path} is not a run directory: it has no config.yaml. Name directories such as runs/NAME.")
    metrics = path / "metrics.jsonl"
    kinds = ("train", "eval")
    records, damaged = recorded.read_records(metrics, kinds) if metrics.exists() else ({kind: [] for kind in kinds}, 0)
    starts, rollbacks = recorded.read_starts(path)
    config = _config(path / "config.yaml")
    return Run(path, config, starts, rollbacks, records["train"], records["eval"], recorded.read_end(path), damaged)


def _config(path: Path) -> Record:
    """The keys of a config.yaml by dotted name, with values of JSON. Raises DataError."""
    try:
        tree = parse_json(json.dumps(yaml_tree(path)).encode())  # no dates, no sets
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: not a readable config: {' '.join(str(error).split())}") from None
    leaves = flatten(tree, TABLES) if isinstance(tree, dict) else ()
    config = {key: value for key, value in leaves if not key.startswith(GONE)}
    known = {key: kind for key, kind in KEYS.items() if config.get(key) != AUTO}
    needed = ("train.steps", *({"run.seed"} & config.keys()))
    recorded.checked(config, known, f"{path}: not the config of a run", needed)
    if config.get("schedule.final_share") is not None:
        config.pop("schedule.final_lr", None)  # it follows optim.lr
    return config


def contradicted(run: Run, record: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """(metric, recorded value, computed value, sentence) for each contradiction of an eval record with its rows, at
    every context. Raises DataError for a damaged file of evals/."""
    for of in dict.fromkeys(found[0] if (found := re.search(r"_ctx\d+$", name)) else "" for name in record):
        metrics = {name.removesuffix(of): value for name, value in record.items() if name.endswith(of)}
        of_rows = of.replace("_ctx", "_context_")
        rows = run.rows_at(record["step"], of_rows)
        for name, old, new in contradictions(metrics, rows):
            what = f"its rows in {rows_file(record['step'], of_rows)} give" if rows else "its other metrics give"
            says = f"the eval record of step {record['step']} says {name}{of} {show(old)}, {what} {show(new)}"
            yield f"{name}{of}", old, new, says


Arms = Mapping[str, Sequence[Run]]  # by name


def common_budgets(arms: Arms) -> dict[Path, int]:
    """The budget of each run in tokens. Budgets that differ by the rounding to whole steps become equal."""
    budgets = {run.path: run.budget for runs in arms.values() for run in runs}
    found: dict[Path, int] = {}
    first = 0.0
    for path, budget in sorted(budgets.items(), key=lambda item: item[1]):
        if budget > first * (1 + SAME_BUDGET):
            first = budget
        found[path] = round(first)
    return found
