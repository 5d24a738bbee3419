"""Writes a restored model into a directory for other programs, with README.md, its card, and compares the two."""

import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ngpt_train
from ngpt_train.config.places import new_directory
from ngpt_train.config.sections.verbs import ExportConfig
from ngpt_train.config.stored import write_yaml
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, read_json, sync, write_json
from ngpt_train.core.secrets import redacted
from ngpt_train.evaluation.restore import Restored
from ngpt_train.interop.layouts.layout import NOTE, Layout, Tensors
from ngpt_train.interop.safetensors_files import FLOATS, write_tensors
from ngpt_train.interop.tokenizer_files import OF_TRANSFORMERS, write_tokenizers
from ngpt_train.interop.verification import AUTO_MODELS, check_bits, check_logits, check_reader, difference, random_rows
from ngpt_train.models.weights import export_weights, load_weights
from ngpt_train.training.checkpoint.catalogue import read_progress

CONFIG = "ngpt_train_config.yaml"  # the run's config, in every export
STATISTICS = "statistics."  # prefix of running statistics, as in a checkpoint
DTYPES = {name: dtype for dtype, name in FLOATS.items()}
METRICS = ("loss", "ppl", "bits_per_byte")


def export(restored: Restored, own: ExportConfig, layout: Layout, say: Callable[[str], object]) -> Path:
    """Writes export.out, complete or not at all; returns it. say: called with each sentence of the output. Raises
    ConfigError or DataError if it cannot be written, NumericalError if the written model differs."""
    assert own.out is not None
    out = Path(own.out).expanduser()
    try:
        with new_directory("export.out", out) as work:
            said = []
            for sentence in _write(restored, own, layout, work):
                said.append(sentence)
                say(sentence)
            has_tokenizer = (work / OF_TRANSFORMERS).exists()
            (work / "README.md").write_text(redacted(card(restored, layout, own.dtype, said, has_tokenizer)))
            mode = (work / "config.json").stat().st_mode
            for path in work.rglob("*"):
                if path.is_file():
                    path.chmod(mode)  # safetensors writes files for their owner alone
                sync(path)
    except OSError as error:
        if error.errno is None:  # of transformers, not of the disk
            raise
        raise DataError(f"export.out={out}: cannot be written ({error.strerror}). Make room, or name another") from None
    return out


def _write(restored: Restored, own: ExportConfig, layout: Layout, work: Path) -> Iterator[str]:
    """Writes all files but README.md, and compares them with the model. Yields the sentences of the output."""
    config, model, tokenizer = restored.config.model, restored.model, restored.tokenizer
    trained = export_weights(model)
    weights = rounded(trained, own.dtype)
    stored = weights | {f"{STATISTICS}{name}": value.clone() for name, value in model.statistics().items()}
    tensors = layout.to_foreign(stored, config)
    files = write_tensors(work, tensors, own.max_shard_gb * 1e9)
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    yield f"{layout.name}, {own.dtype}: {len(tensors)} tensors, {n_bytes:,} bytes in {len(files)} file(s)"

    ends = {"bos_token_id": tokenizer.eos, "eos_token_id": tokenizer.eos}
    config_json = layout.config_json(config)
    config_json[NOTE] = {"layout": layout.name, **config_json.get(NOTE, {})}  # for `import`
    if layout.objective == "translation":
        ends |= {"decoder_start_token_id": tokenizer.eos}
    if layout.for_transformers:
        config_json |= {**ends, "dtype": str(DTYPES[own.dtype]).removeprefix("torch."), "use_cache": True}
        # config.json has no padding id: transformers would give the embedding of that id no gradient.
        own_ids = list(range(tokenizer.vocab_size, int(config.vocab_size)))  # of no text; ours never samples them
        more = {"suppress_tokens": own_ids} if own_ids else {}
        write_json(work / "generation_config.json", {**ends, "pad_token_id": tokenizer.eos, **more})
    write_json(work / "config.json", config_json)
    for path in layout.files:
        shutil.copyfile(path, work / path.name)
    write_yaml(restored.config, work / CONFIG)
    reads_eos_first = config.objective not in ("prefix_continuation", "translation")  # a decoder reads an eos first
    yield write_tokenizers(work, tokenizer, config.context, reads_eos_first)

    yield check_bits(work, layout, config_json, stored, tensors)
    if not layout.for_transformers:
        yield check_reader(work, stored)
        return
    rows = random_rows(config, own.rows)
    if own.dtype != "fp32":
        yield _move_to(model, trained, weights, rows, own.dtype)
    yield from check_logits(work, layout, model, weights, rows, DTYPES[own.dtype])


def rounded(weights: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The weights in `dtype`. Raises DataError if a weight is too large for it."""
    found = {name: weight.to(DTYPES[dtype]) for name, weight in weights.items()}
    if bad := [name for name, weight in found.items() if not weight.isfinite().all()]:
        largest = weights[bad[0]].abs().max().item()
        raise DataError(f"export.dtype={dtype}: {bad[0]} has {largest:g}, which {dtype} cannot hold. Use fp32 or bf16")
    return found


def _move_to(model: torch.nn.Module, trained: Tensors, weights: Tensors, rows: Tensor, dtype: str) -> str:
    """Gives `model` the rounded weights. Returns a sentence with the change of its logits."""
    with torch.no_grad():
        before = [model(row) for row in rows.split(1)]
    load_weights(model, {name: weight.float() for name, weight in weights.items()})
    moved = difference(rows, lambda row: before.pop(0), model)
    return f"rounding the weights to {dtype} moves a logit by {moved} at most"


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
pipeline_tag: {TASKS[layout.objective]}
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


TASKS = {"next_token": "text-generation", "masked": "fill-mask", "translation": "translation"}  # the hub's words


def plain(text: str) -> str:
    """Escapes a text of the run for Markdown: no link, tag, cell or line begins in it."""
    return re.sub(r"[\\`*\[\]<>|]", r"\\\g<0>", " ".join(text.split()))


def _last_start(run: Path) -> Any:
    """The run's last entry in run.json; empty for a checkpoint that was copied out of its run."""
    try:
        return read_json(run / "run.json")["starts"][-1]
    except (DataError, LookupError, TypeError):
        return {}


def _validation(run: Path, step: int, restored: Restored) -> str:
    """The metrics of the run's last eval record up to `step`."""
    path, last = run / "metrics.jsonl", None
    for _, record in json_lines(path) if path.is_file() else ():
        is_eval = record is not None and record.get("kind") == "eval" and type(record.get("loss")) is float
        if is_eval and record.get("step", -1) <= step:
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
    here, auto = '"."' + ", trust_remote_code=True" * bool(layout.files), AUTO_MODELS[layout.objective]
    lines = [f"from transformers import {auto}", "", f"model = {auto}.from_pretrained({here})"]
    if has_tokenizer:
        lines[0] += ", AutoTokenizer"
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({here})")
        if layout.objective != "masked":
            text = 'model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=50)[0]'
            lines.append(f"print(tokenizer.decode({text}))")
    return "\n".join(lines)
