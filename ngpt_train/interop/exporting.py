"""Writes a restored model into a directory for other programs, and compares the directory with the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ngpt_train.config.sections.verbs import ExportConfig
from ngpt_train.config.stored import write_yaml
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import sync, write_json
from ngpt_train.core.secrets import redacted
from ngpt_train.evaluation.restore import Restored
from ngpt_train.interop.card import card
from ngpt_train.interop.layouts.layout import Layout
from ngpt_train.interop.layouts.llama_config import NOTE
from ngpt_train.interop.new_directory import check_free, new_directory
from ngpt_train.interop.safetensors_files import FLOATS, write_tensors
from ngpt_train.interop.tokenizers.tokenizer_files import write_tokenizers
from ngpt_train.interop.verification import check_bits, check_logits, check_reader, difference, random_rows
from ngpt_train.models.weights import export_weights, load_weights

CONFIG = "ngpt_train_config.yaml"  # the run's config, in every export
STATISTICS = "statistics."  # prefix of running statistics, as in a checkpoint
DTYPES = {name: dtype for dtype, name in FLOATS.items()}


def export(restored: Restored, own: ExportConfig, layout: Layout, say: Callable[[str], object]) -> Path:
    """Writes export.out, complete or not at all; returns it. say: called with each sentence of the output.

    Raises ConfigError or DataError if it cannot be written, NumericalError if the written model differs.
    """
    assert own.out is not None
    out = Path(own.out).expanduser()
    check_free("export.out", out)
    try:
        with new_directory("export.out", out) as work:
            said = []
            for sentence in _write(restored, own, layout, work):
                said.append(sentence)
                say(sentence)
            has_tokenizer = (work / "tokenizer.json").exists()
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
    statistics = {f"{STATISTICS}{name}": value.clone() for name, value in model.statistics().items()}
    tensors = layout.to_foreign({**weights, **statistics}, config)
    files = write_tensors(work, tensors, own.max_shard_gb * 1e9)
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    yield f"{layout.name}, {own.dtype}: {len(tensors)} tensors, {n_bytes:,} bytes in {len(files)} file(s)"

    ends = {"bos_token_id": tokenizer.eos, "eos_token_id": tokenizer.eos}
    config_json = layout.config_json(config)
    config_json[NOTE] = {"layout": layout.name, **config_json.get(NOTE, {})}  # for `import`
    if layout.for_transformers:
        config_json |= {**ends, "dtype": str(DTYPES[own.dtype]).removeprefix("torch."), "use_cache": True}
        # config.json has no padding id: transformers would give the embedding of that id no gradient.
        write_json(work / "generation_config.json", {**ends, "pad_token_id": tokenizer.eos})
    write_json(work / "config.json", config_json)
    for path in layout.files():
        shutil.copyfile(path, work / path.name)
    write_yaml(restored.config, work / CONFIG)
    reads_eos_first = config.objective != "prefix_continuation"  # a decoder reads an eos before a document
    yield from write_tokenizers(work, tokenizer, config.context, reads_eos_first)

    yield check_bits(work, layout, config_json, {**weights, **statistics})
    if not layout.for_transformers:
        yield check_reader(work, {**weights, **statistics})
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


def _move_to(
    model: torch.nn.Module, trained: dict[str, Tensor], weights: dict[str, Tensor], rows: Tensor, dtype: str
) -> str:
    """Gives `model` the rounded weights. Returns a sentence with the change of its logits."""
    with torch.no_grad():
        before = [model(row) for row in rows.split(1)]
    load_weights(model, {name: weight.float() for name, weight in weights.items()})
    moved = difference(rows, lambda row: before.pop(0), model)
    return f"rounding the weights to {dtype} moves a logit by {moved} at most"
