"""Run directories without training: configs of real arms, records of one's choice."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ngpt_train.config import load_config
from ngpt_train.config.keys import TABLES
from ngpt_train.config.stored import to_dict
from ngpt_train.config.validate import flatten, nested
from ngpt_train.study.compare.runs import Run, read_run

FACTS = {
    "time": "2026-11-22T12:00:00+0000",
    "step": 0,
    "git_commit": "1" * 40,
    "versions": {"ngpt_train": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    "device": "cpu",
    "world_size": 1,
    "parallel": "single",
    "n_params": 660864,
    "data_fingerprint": "d" * 64,
    "tokenizer": "bytes",
    "tokenizer_fingerprint": "a" * 64,
}


def config_of(*overrides: str) -> dict[str, Any]:
    """The config of a run by dotted keys, as config.yaml has it."""
    found = dict(flatten(to_dict(load_config(["scale=debug", *overrides])), TABLES))
    return found | {"model.vocab_size": 4096} if found["model.vocab_size"] == "auto" else found


def plant(
    path: Path,
    config: Mapping[str, Any],
    facts: Mapping[str, Any] = FACTS,
    loss: float = 3.0,
    rows: str = "95a65f937612a073",
    order: Sequence[str] = ("rows", "rows"),
    clipped: float = 0.5,
    bits_per_byte: float | None = 1.5,
    later: Sequence[Mapping[str, Any]] = (),
) -> Run:
    """Writes a run with a train record at each half of it, and a validation at its end.

    order: what data_hash says of the rows of both. later: entries of later starts in run.json."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(nested(config)))
    (path / "run.json").write_text(json.dumps({"starts": [facts, *later], "saved": config["train.steps"]}))
    steps = config["train.steps"]
    tokens = config.get("train.batch_rows", 8) * config.get("model.context", 64)
    lines: list[dict[str, Any]] = []
    for step, read in zip((steps // 2, steps), order, strict=True):
        so_far: dict[str, Any] = {"step": step, "tokens": step * tokens, "flops": 1e6 * step * tokens}
        so_far["data_hash"] = f"{read} {step * tokens}"
        lines.append({"kind": "train", "loss": loss, "clipped": clipped, **so_far})
    if bits_per_byte is not None:  # a text has a whole number of bytes
        nats = 4 * (25 * loss)
        bits_per_byte = nats / math.log(2) / round(nats / math.log(2) / bits_per_byte)
    end = {"kind": "eval", "step": steps, "tokens": steps * tokens, "loss": loss, "ppl": math.exp(loss)}
    lines.append(end | {"rows_hash": rows, "n_targets": 100, "bits_per_byte": bits_per_byte})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "evals").mkdir()
    with (path / f"evals/step_{steps:08d}.npz").open("wb") as file:
        np.savez(file, loss_sum=np.full(4, 25 * loss), n_targets=np.full(4, 25), rows_hash=np.array(rows))
    return read_run(path)
