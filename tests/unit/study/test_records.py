"""Records that others have written: read within bounds, each field of its kind, and equal to the losses of the rows."""

import io
import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngpt_train.core.errors import DataError
from ngpt_train.study.compare.given_runs import check_evals
from ngpt_train.study.compare.runs import Run, read_run
from tests.unit.study.planted import config_of, plant

WRONG: tuple[Any, ...] = ("x", -1, True, [1], {"a": 1})
FIELDS = (
    *(
        ("metrics.jsonl", name)
        for name in ("step", "tokens", "flops", "train_seconds", "loss", "rows_hash", "n_targets")
    ),
    *(("run.json", name) for name in ("n_params", "world_size", "git_commit", "versions", "step", "rollbacks")),
    *(("exit.json", name) for name in ("code", "reason", "step")),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    planted = plant(tmp_path / "run", config_of("model=gpt", "train.steps=4"))
    (planted.path / "exit.json").write_text(json.dumps({"code": 0, "reason": "done", "step": 4}))
    return planted


def with_value(path: Path, name: str, value: Any) -> None:
    """Puts a value into the last record, the first start, or the object of a file."""
    if path.suffix == ".jsonl":
        *lines, last = path.read_text().splitlines()
        path.write_text("\n".join([*lines, json.dumps(json.loads(last) | {name: value})]) + "\n")
        return
    content = json.loads(path.read_text())
    at = content if name in ("rollbacks", "code", "reason") or path.name == "exit.json" else content["starts"][0]
    at[name] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(("file", "name"), FIELDS)
def test_a_field_of_another_kind_is_named(run: Run, file: str, name: str) -> None:
    """Caught: a traceback of whoever uses the field first, or a number that is none."""
    original = (run.path / file).read_bytes()
    right = {"rows_hash": ["x"], "git_commit": ["x"], "reason": ["x"]}.get(name, [])
    for value in WRONG:
        if value in right:
            continue
        (run.path / file).write_bytes(original)
        with_value(run.path / file, name, value)
        with pytest.raises(DataError, match=name) as caught:
            read_run(run.path)
        assert file in str(caught.value), value


def rows_file(run: Run) -> Path:
    (path,) = (run.path / "evals").glob("*.npz")
    return path


def array(values: Any, shape: str | None = None) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=True)
    content = buffer.getvalue()
    return content if shape is None else content.replace(f"({len(values)},)".encode(), shape.encode())


def archive(path: Path, compression: int = zipfile.ZIP_STORED, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)


@pytest.mark.parametrize("attack", ["header", "bomb", "pickle", "no array", "more", "fewer", "negative", "loss", "cut"])
def test_a_forged_file_of_rows(run: Run, attack: str) -> None:
    """One sentence, within a moment and little memory. Caught: 10^12 rows that a header promises, 800 MB in 800 KB,
    objects, members that are no arrays."""
    path, two = rows_file(run), np.ones(2)
    ok = {"loss_sum": array(two), "n_targets": array(np.ones(2, np.int64)), "rows_hash": array(np.array("a"))}
    if attack == "header":
        archive(path, **ok | {"loss_sum": array(two, "(1000000000000,)")})
    elif attack == "bomb":
        archive(path, zipfile.ZIP_DEFLATED, **ok | {"loss_sum": array(np.zeros(10_000_000))})
    elif attack == "pickle":
        archive(path, **ok | {"rows_hash": array(np.array([{}], dtype=object))})
    elif attack == "no array":
        archive(path, **ok | {"loss_sum": b"no array"})
    elif attack == "more":
        archive(path, **ok, other=array(two))
    elif attack == "fewer":
        archive(path, **ok | {"n_targets": array(np.ones(3, np.int64))})
    elif attack == "negative":
        archive(path, **ok | {"n_targets": array(np.array([-5, 7]))})
    elif attack == "loss":
        archive(path, **ok | {"loss_sum": array(np.array([-1.0, 9.0]))})
    else:
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=path.name):
        check_evals([read_run(run.path)])


def with_losses(run: Run, factor: float) -> None:
    with np.load(rows_file(run)) as file:
        kept = {name: file[name] for name in file.files}
    np.savez(rows_file(run), **kept | {"loss_sum": kept["loss_sum"] * factor})


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_the_rows_of_a_run_that_diverged(run: Run, factor: float) -> None:
    """Caught: such rows refused beside the record that training writes of them, or a traceback at the sum of them."""
    with_losses(run, factor)
    metrics = {"loss": None, "ppl": None if math.isnan(factor) else math.exp(700), "bits_per_byte": None}
    for name, value in metrics.items():
        with_value(run.path / "metrics.jsonl", name, value)
    check_evals([read_run(run.path)])


@pytest.mark.parametrize("forged", ["loss", "n_targets", "rows_hash", "ppl", "bits_per_byte", "rows", "nan", "-inf"])
def test_records_and_rows_contradict_each_other(run: Run, forged: str) -> None:
    """Caught: a loss that nobody measured, or rows of another validation: a table with an interval came of both."""
    check_evals([run])
    if forged in ("rows", "nan", "-inf"):
        with_losses(run, 0.5 if forged == "rows" else float(forged))
    else:
        value = run.evals[-1].get(forged, 20.0)
        other = f"{value}0" if isinstance(value, str) else type(value)(value + 1)
        with_value(run.path / "metrics.jsonl", forged, other)
    problem = r"losses cannot be" if forged == "-inf" else r"step 4 says .*step_00000004\.npz give"
    with pytest.raises(DataError, match=problem):
        check_evals([read_run(run.path)])


@pytest.mark.parametrize("file", ["metrics.jsonl", "run.json", "config.yaml", "exit.json", "evals/step_00000004.npz"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_what_is_no_file_is_not_waited_for(run: Run, file: str, kind: str) -> None:
    path = run.path / file
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=path.name):
        check_evals([read_run(run.path)])


def test_keys_that_are_gone_make_no_difference(tmp_path: Path) -> None:
    """Caught: runs of an earlier version beside new ones, which differ in the keys of a verb that is gone."""
    planted = plant(tmp_path / "run", config_of("model=gpt", "train.steps=4"))
    new = read_run(planted.path).config
    path = planted.path / "config.yaml"
    path.write_text(path.read_text() + "\nbench: {what: data, out: null}\n")
    assert read_run(planted.path).config == new
