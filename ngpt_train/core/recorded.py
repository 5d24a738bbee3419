"""The records of a run: who takes them while it trains, and the kind of each field in its files. Others may have
written the files, so each field is checked as it is read, and whoever uses it later may trust it. Without torch:
wandb's process imports it."""

import json
import math
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ngpt_train.core.constants import ANSWERED, TRANSLATED
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, read_json

ALARM = "alarm: "  # begins a message that has to reach people who do not look at the log

Record = dict[str, Any]


class Sink:
    """Takes the records and messages of a run: metrics.jsonl, the console, wandb. Only rank 0 has sinks."""

    def log(self, record: Record) -> None:
        """Takes a record {"kind": "train" | "eval" | "tasks" | "sample" | "telemetry" | "rollback", "step": n, ...}.
        Its other values are numbers or None; a sample also has texts."""

    def message(self, text: str) -> None:
        """Takes one line for people."""

    def close(self, reason: str) -> None:
        """Called once, last. reason: how the run ended."""


class Kind(NamedTuple):
    """Values of one of the types, and numbers from `least` to `most`; NaN is none of them."""

    says: str
    types: tuple[type, ...]
    least: float = 0
    most: float = 0

    def holds(self, value: Any) -> bool:
        return type(value) in self.types and (self.least == self.most or self.least <= value <= self.most)


COUNT = Kind("a whole number, 0 or more", (int,), 0, 2**63 - 1)
POSITIVE = Kind("a whole number above 0", (int,), 1, 2**63 - 1)
NUMBER = Kind("a finite number", (int, float), -sys.float_info.max, sys.float_info.max)
AMOUNT = Kind("a finite number, 0 or more", (int, float), 0, sys.float_info.max)
ABOVE_0 = Kind("a finite number above 0", (int, float), sys.float_info.min, sys.float_info.max)
SHARE = Kind("a number from 0 to 1", (int, float), 0, 1)
FLAG = Kind("true or false", (bool,))
TEXT = Kind("a text", (str,))
LIST = Kind("a list", (list,))
TABLE = Kind("an object of named values", (dict,))

# Beside a file of rows of evals/, without its ending: the answers to its rows.
ANSWERS = "_answers.jsonl"
Fields = Mapping[str, Kind]  # by name; "" stands for all other names

# docs/records.md. A field that is not here is used by nothing that reads the records of others.
SO_FAR: Fields = {"step": COUNT, "tokens": COUNT, "train_seconds": AMOUNT, "flops": AMOUNT}
RECORDS: Mapping[str, Fields] = {
    "train": {
        **SO_FAR,
        **dict.fromkeys(("loss", "loss_mean", "z_loss", "lr", "grad_norm", "epochs", "tokens_per_s", "mfu"), AMOUNT),
        **dict.fromkeys(("step_time", "data_time", "memory_gb"), AMOUNT),
        **{"data_hash": TEXT, "skipped": COUNT, "clipped": SHARE, "padding": SHARE},
    },
    "eval": {
        **SO_FAR,
        **dict.fromkeys(("loss", "ppl", "bits_per_byte"), AMOUNT),
        **dict.fromkeys((*ANSWERED, *TRANSLATED), NUMBER),
        **{"rows": COUNT, "n_targets": COUNT, "rows_hash": TEXT},
    },
    "telemetry": {**SO_FAR, "kind": TEXT, "": NUMBER},
}
START: Fields = {
    **{"step": COUNT, "world_size": POSITIVE, "threads": POSITIVE, "n_params": COUNT},
    **dict.fromkeys(("time", "git_commit", "device", "cpu", "parallel", "tokenizer"), TEXT),
    **dict.fromkeys(("data_fingerprint", "tokenizer_fingerprint"), TEXT),
    **{"versions": TABLE, "changed": LIST},
}
END: Fields = {"code": COUNT, "reason": TEXT, "step": COUNT}
FIX = "Restore it, or leave it out."


def checked(found: Any, fields: Fields, where: str, needed: Collection[str] = (), fix: str = FIX) -> Record:
    """`found`, an object whose fields are of their kinds, or null where that is not known and not `needed`. Raises
    DataError, which begins with `where`."""
    if type(found) is not dict:
        raise DataError(f"{where}: it is no object of named values. {fix}")
    for name in dict.fromkeys([*needed, *found]):
        value, kind = found.get(name), fields.get(name, fields.get(""))
        if kind is not None and not kind.holds(value) and (value is not None or name in needed):
            shown = json.dumps(value, default=str)
            shown = f"{shown[:80]}..." if len(shown) > 80 else shown
            raise DataError(f"{where}: {name}={shown} is not {kind.says}. {fix}")
    return found


def all_checked(found: Any, fields: Fields, where: str, needed: Collection[str] = (), fix: str = FIX) -> list[Record]:
    """`found`, a list of objects as `checked` has them. Raises DataError."""
    if type(found) is not list:
        raise DataError(f"{where}: it is no list. {fix}")
    return [checked(each, fields, f"{where}[{number}]", needed, fix) for number, each in enumerate(found)]


def read_records(path: Path, kinds: Collection[str]) -> tuple[dict[str, list[Record]], int]:
    """The records of these kinds in a metrics.jsonl, by step: of two of a step, which a run that was killed may leave,
    the later. Also how many lines are cut or damaged. Raises DataError where a field is not of its kind."""
    by_step: dict[str, dict[int, Record]] = {kind: {} for kind in kinds}
    damaged = 0
    for number, (_, record) in enumerate(json_lines(path), start=1):
        if record is None:
            damaged += 1
        elif (kind := str(record.get("kind"))) in by_step:
            fields = RECORDS[kind]
            where = f"{path}, line {number}, {kind} record of step {str(record.get('step'))[:20]}"
            # The metrics of other contexts, such as loss_ctx2048.
            of_contexts = {name: fields.get(re.sub(r"_ctx\d+$", "", name), fields.get("")) for name in record}
            known = {"step": fields["step"]} | {name: kind for name, kind in of_contexts.items() if kind is not None}
            record = checked(finite(record), known, where, ("step",))
            by_step[kind][record["step"]] = record
    return {kind: [found[step] for step in sorted(found)] for kind, found in by_step.items()}, damaged


def read_starts(run: Path) -> tuple[list[Record], list[Record]]:
    """The starts and the rollbacks that run.json notes; none where there is no such file. Raises DataError."""
    path = run / "run.json"
    if not path.exists():
        return [], []
    found = checked(read_json(path), {"starts": LIST, "rollbacks": LIST}, str(path), ("starts",))
    starts = all_checked(found["starts"], START, f"{path}: starts")
    for number, start in enumerate(starts):
        checked(start.get("versions") or {}, {"": TEXT}, f"{path}: starts[{number}].versions")
        all_checked(start.get("changed") or [], {"key": TEXT}, f"{path}: starts[{number}].changed")
    return starts, all_checked(found.get("rollbacks") or [], {"step": COUNT}, f"{path}: rollbacks", ("step",))


def read_end(run: Path) -> Record | None:
    """exit.json: code, reason, step; None where the run has not ended by itself. Raises DataError."""
    path = run / "exit.json"
    return checked(read_json(path), END, str(path), tuple(END)) if path.exists() else None


def printable(line: str) -> str:
    """Text from a file that others may have written, without line breaks, which would be read as ours, and without the
    codes that redraw a terminal."""
    return "".join(x if x.isprintable() else "?" for x in line)


def finite(value: Any) -> Any:
    """The value in JSON, of mappings and lists too: NaN and infinities, which JSON lacks, are None, for not known.
    Numbers of numpy are Python's."""
    if isinstance(value, Mapping):
        return {str(name): finite(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(x) for x in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def measured(record: Record, digits: int) -> str:
    """The metrics of an eval record beside its loss: `ppl 53.9  bits/byte 1.521` of a text, `accuracy 0.8123  f1 0.79`
    of labels, both of masked tokens, and the scores of translations."""
    found = [f"{name} {record[name]:.{digits}f}" for name in ANSWERED if name in record]
    found += [f"{name} {record[name]:.2f}" for name in TRANSLATED if name in record]
    if math.isfinite(bits := record["bits_per_byte"]):
        found = [f"ppl {record['ppl']:.{digits}g}", f"bits/byte {bits:.{digits}f}", *found]
    return "  ".join(found)


def compared(record: Mapping[str, Any], metric: str) -> float | None:
    """The value of one of METRICS in an eval record; None if it has none."""
    value = record.get("accuracy" if metric == "error" else metric)
    if value is None or metric in ("loss", "bits_per_byte"):
        return value
    return (100 if metric in TRANSLATED else 1) - value
