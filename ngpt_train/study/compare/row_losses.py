"""The files of evals/, with the loss of each validation row: read within bounds, and compared with their record."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_whole

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
        raise DataError(
            f"{path} is damaged, or is not as the program writes it: {why}. Leave this run out, or evaluate its "
            "checkpoint again."
        ) from None
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
    with its other metrics.

    Equal means to the bit: numpy adds in the same order everywhere. Only exp may differ in its last digit.
    """
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
