"""Writes README.md, the card of an exported model: its facts, its origin, its loading."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ngpt_train
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, read_json
from ngpt_train.evaluation.restore import Restored
from ngpt_train.interop.layouts.layout import Layout
from ngpt_train.training.checkpoint.catalogue import read_progress

METRICS = ("loss", "ppl", "bits_per_byte")


def card(restored: Restored, layout: Layout, dtype: str, said: Sequence[str], has_tokenizer: bool) -> str:
    """The text of README.md. said: the output of `export`. has_tokenizer: AutoTokenizer reads the directory."""
    config, run = restored.config, restored.path.resolve().parent.parent
    progress, start = read_progress(restored.path), _last_start(run)
    versions = ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())
    facts = {
        "architecture": f"{config.model.name}, {config.model.n_layers} blocks, d_model {config.model.d_model}",
        "parameters": f"{restored.model.n_params():,}",
        "written as": f"{layout.name}, {dtype}",
        "trained on": f"{config.data.repo or config.data.kind}, {progress['tokens']:,} tokens, {restored.step:,} steps",
        "`data_hash` of the rows read": progress["data"].get("data_hash") or "not recorded",
        "weights": restored.of_what or "the trained ones of one checkpoint",
        "last validation": _validation(run, progress["step"], restored),
        "context": f"{config.model.context} tokens",
        "tokenizer": restored.tokenizer.name,
        "git commit of the run": start.get("git_commit") or "not recorded",
        "versions of the run": versions or "not recorded",
        "exported by": f"ngpt_train {ngpt_train.__version__}, commit {git_commit() or 'not known'}, "
        f"torch {torch.__version__}, python {platform.python_version()}",
    }
    rows = "\n".join(f"| {name} | {plain(value)} |" for name, value in facts.items())
    checks = "\n".join(f"- {line.strip()}" for line in said)
    return f"""---
library_name: {"transformers" if layout.for_transformers else "ngpt-train"}
pipeline_tag: text-generation
---

# {plain(config.run.name)}

| | |
|---|---|
{rows}

The config of the run is `ngpt_train_config.yaml`. No licence is claimed here.

## Load it

```python
{_loading(layout, has_tokenizer)}
```

## Checks of the export

{checks}
"""


def plain(text: str) -> str:
    """Escapes a text of the run for Markdown: no link, tag, cell or line begins in it."""
    return re.sub(r"[\\`*\[\]<>|]", r"\\\g<0>", " ".join(text.split()))


def _last_start(run: Path) -> dict[str, Any]:
    """The run's last entry in run.json; empty for a checkpoint that was copied out of its run."""
    try:
        start: dict[str, Any] = read_json(run / "run.json")["starts"][-1]
    except (DataError, LookupError, TypeError):
        return {}
    return start


def _validation(run: Path, step: int, restored: Restored) -> str:
    """The metrics of the run's last eval record up to `step`."""
    last = None
    if (run / "metrics.jsonl").is_file():
        for _, record in json_lines(run / "metrics.jsonl"):
            known = record is not None and record.get("kind") == "eval" and type(record.get("loss")) is float
            if record is not None and known and record.get("step", -1) <= step:
                last = record
    if last is None:
        return "not recorded"
    numbers = ", ".join(f"{name} {last[name]:.6g}" for name in METRICS if type(last.get(name)) is float)
    of = " of the trained weights, not of these" if restored.of_what else ""
    return f"{numbers} at step {last['step']:,}{of}"


def _loading(layout: Layout, has_tokenizer: bool) -> str:
    """Code that loads the model."""
    if not layout.for_transformers:
        return 'from read_weights import read\n\nweights = read(".")  # numpy arrays by name'
    trust = ", trust_remote_code=True" if layout.files() else ""
    if not has_tokenizer:
        return f"""from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("."{trust})"""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{trust})
tokenizer = AutoTokenizer.from_pretrained("."{trust})
print(tokenizer.decode(model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=50)[0]))"""
