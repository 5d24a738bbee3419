"""README.md of an exported model: what it is, where it comes from, how it is loaded."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ngpt_train
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, read_json
from ngpt_train.evaluation.restore import Restored
from ngpt_train.training.checkpoint.integrity import read_progress

METRICS = ("loss", "ppl", "bits_per_byte")


@dataclass(frozen=True)
class Origin:
    """Where the weights come from, as far as the run says it; None where it does not."""

    tokens: int
    data_hash: str | None  # of the rows that training has consumed
    git_commit: str | None  # of the run's last start
    versions: dict[str, str]
    validation: dict[str, Any] | None  # the last eval record up to the checkpoint


def origin_of(checkpoint: Path) -> Origin:
    """The origin by the checkpoint and the files of its run."""
    progress = read_progress(checkpoint)
    run = checkpoint.resolve().parent.parent
    try:
        start = read_json(run / "run.json")["starts"][-1]
    except (DataError, LookupError, TypeError):  # a checkpoint that was copied out of its run
        start = {}
    validation = None
    if (run / "metrics.jsonl").is_file():
        for _, record in json_lines(run / "metrics.jsonl"):
            known = record is not None and record.get("kind") == "eval" and type(record.get("loss")) is float
            if record is not None and known and record.get("step", -1) <= progress["step"]:
                validation = record
    return Origin(
        progress["tokens"],
        progress["data"].get("data_hash"),
        start.get("git_commit"),
        start.get("versions") or {},
        validation,
    )


class Reader(NamedTuple):
    """The program that reads an exported model."""

    transformers: bool  # else read_weights.py
    runs_code: bool  # whether transformers has to be told to run the modeling file
    tokenizes: bool  # whether transformers reads the tokenizer, too


def card(restored: Restored, layout: str, dtype: str, said: Sequence[str], reader: Reader) -> str:
    """The text of README.md. said: what `export` has printed."""
    config, origin = restored.config, origin_of(restored.path)
    data = config.data.repo or config.data.kind
    n_params = restored.model.n_params()
    facts = {
        "architecture": f"{config.model.name}, {config.model.n_layers} blocks, d_model {config.model.d_model}",
        "parameters": f"{n_params:,}",
        "written as": f"{layout}, {dtype}",
        "trained on": f"{data}, {origin.tokens:,} tokens, {restored.step:,} steps",
        "`data_hash` of the rows read": origin.data_hash or "not recorded",
        "weights": restored.of_what or "the trained ones of one checkpoint",
        "last validation": _validation(origin, restored),
        "context": f"{config.model.context} tokens",
        "tokenizer": restored.tokenizer.name,
        "git commit of the run": origin.git_commit or "not recorded",
        "versions of the run": ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        or "not recorded",
        "exported by": f"ngpt_train {ngpt_train.__version__}, commit {git_commit() or 'not known'}, "
        f"torch {torch.__version__}, python {platform.python_version()}",
    }
    rows = "\n".join(f"| {name} | {plain(value)} |" for name, value in facts.items())
    checks = "\n".join(f"- {line.strip()}" for line in said)
    return f"""---
library_name: {"transformers" if reader.transformers else "ngpt-train"}
pipeline_tag: text-generation
---

# {plain(config.run.name)}

| | |
|---|---|
{rows}

The config of the run is `ngpt_train_config.yaml`. No licence is claimed here.

## Load it

```python
{_loading(reader)}
```

## Checks of the export

{checks}
"""


def plain(text: str) -> str:
    """A text of the run as Markdown that shows it letter by letter: no link, tag, cell or line begins in it."""
    return re.sub(r"[\\`*\[\]<>|]", r"\\\g<0>", " ".join(text.split()))


def _validation(origin: Origin, restored: Restored) -> str:
    record = origin.validation
    if record is None:
        return "not recorded"
    numbers = ", ".join(f"{name} {record[name]:.6g}" for name in METRICS if type(record.get(name)) is float)
    of = " of the trained weights, not of these" if restored.of_what else ""
    return f"{numbers} at step {record['step']:,}{of}"


def _loading(reader: Reader) -> str:
    if not reader.transformers:
        return 'from read_weights import read\n\nweights = read(".")  # numpy arrays by name'
    trust = ", trust_remote_code=True" if reader.runs_code else ""
    if not reader.tokenizes:
        return f"""from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("."{trust})"""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{trust})
tokenizer = AutoTokenizer.from_pretrained("."{trust})
print(tokenizer.decode(model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=50)[0]))"""
