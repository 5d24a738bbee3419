"""Compares a written directory with the model that it was written from, through its readers.

All arithmetic here is in fp32 on the CPU, also for weights that are written in bf16 or fp16: the model's own weights
are rounded in the same way first, and what is left is the rounding of fp32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.interop.layouts import llama_arithmetic
from ngpt_train.interop.layouts.layout import Layout
from ngpt_train.interop.safetensors_files import read_tensors
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.training.guards import NumericalError

# The largest difference of logits that rounding explains, as a share of the largest logit. Each operation rounds by
# 2^-24, RoPE's angles in fp32 are off by up to T 2^-24 rad, and a sharp softmax multiplies both by the size of its
# scores; 1e-4 was seen with large random weights, 1e-6 after training. A weight under a wrong name, transposed, or of
# other pairs moves logits by their own size.
TOLERANCE = 1e-3
LONGEST = 1024  # tokens of a row
EXTRA = "pip install 'ngpt-train[hf]'"
LARGEST = "largest difference of logits"


class Difference(NamedTuple):
    """The largest difference of two models' logits, and the largest logit."""

    largest: float
    scale: float

    def __str__(self) -> str:
        largest = f"{self.largest:.3g}" if self.largest else "0.0"
        return f"{largest} (the largest logit is {self.scale:.3g})"


def random_rows(config: ModelConfig, n_rows: int) -> Tensor:
    """Random ids `(n_rows, T)` of the model's vocabulary, the same each time."""
    assert isinstance(config.vocab_size, int)
    length = min(config.context, LONGEST)
    return torch.randint(config.vocab_size, (n_rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def difference(rows: Tensor, one: Callable[[Tensor], Any], other: Callable[[Tensor], Any]) -> Difference:
    """The difference between the logits of `one` and `other` for rows `(N, T)`, one row at a time."""
    largest = scale = 0.0
    for row in rows.split(1):
        a, b = one(row).float(), other(row).float()
        # A NaN would be lost by max of Python.
        largest = float(torch.stack([torch.tensor(largest), (a - b).abs().max()]).max())
        scale = max(scale, float(b.abs().max()))
    return Difference(largest, scale)


def check_bits(directory: Path, layout: Layout, config_json: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """Reads the directory back and compares each weight bit for bit; says so. Raises NumericalError."""
    _, back = layout.from_foreign(config_json, read_tensors(directory))
    _same(back, weights, "what was written is not what is read back")
    return f"written tensors read back: all {len(weights)} weights equal, bit for bit"


def check_reader(directory: Path, weights: Mapping[str, Tensor]) -> str:
    """Runs the written read_weights.py on the written files; says that it gives the weights. Raises NumericalError."""
    path = directory / "read_weights.py"
    spec = importlib.util.spec_from_file_location("read_weights", path)
    assert spec is not None
    assert spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    found = {name: torch.from_numpy(values.copy()).float() for name, values in reader.read(directory).items()}
    _same(found, weights, f"{path.name} does not read what was written")
    return f"{path.name} reads the same {len(weights)} tensors, bit for bit"


def _same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], problem: str) -> None:
    names = found.keys() ^ wanted.keys()
    names |= {name for name in wanted.keys() & found.keys() if not torch.equal(wanted[name].float(), found[name])}
    if names:
        raise NumericalError(f"export: {problem}: {', '.join(sorted(names)[:5])}. Nothing was exported")


def check_logits(
    directory: Path,
    layout: Layout,
    model: torch.nn.Module,
    weights: Mapping[str, Tensor],
    rows: Tensor,
    dtype: torch.dtype,
) -> Iterator[str]:
    """Has transformers load the directory, and compares its logits with ours; says what it found.

    model: ours, with the weights as they were rounded. Raises NumericalError where the difference is more than
    rounding.
    """
    if find_spec("transformers") is None:
        yield f"logits not compared: transformers is not installed ({EXTRA})"
        return
    config = model.config
    try:
        exported = loaded(directory, layout, torch.float32)
    except ImportError as error:  # of a version that is too old for the modeling file, or of a broken installation
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        yield f"logits not compared: transformers cannot be used ({problem}); {EXTRA} brings one that can"
        return

    def logits(row: Tensor) -> Tensor:
        return exported(row).logits

    with_ours = difference(rows, logits, model)
    n, length = rows.shape
    name = type(exported).__name__
    if not with_ours.largest <= TOLERANCE * with_ours.scale:
        raise NumericalError(
            f"export: the logits of {name} differ by {with_ours}; rounding explains {TOLERANCE:g} of the largest. "
            "Nothing was exported: please report this"
        )
    read = f"{n} rows of {length} random ids in fp32"
    if isinstance(config, GPTConfig):
        float_weights = {key: weight.float() for key, weight in weights.items()}
        exact = difference(rows, logits, lambda row: llama_arithmetic.logits(float_weights, config, row))
        yield f"{read}, {name} and the checkpoint, in the same order of operations: {LARGEST} {exact}"
        if exact.largest:
            import transformers

            yield f"  0 was expected; transformers {transformers.__version__} may compute in another order"
    yield f"{read}, {name} and ngpt-train, whose order is another: {LARGEST} {with_ours}, which is rounding"
    if dtype != torch.float32:
        in_half = difference(rows, _in_half(loaded(directory, layout, dtype)), model)
        yield f"the same rows, {name} in {str(dtype).removeprefix('torch.')} arithmetic: {LARGEST} {in_half}"
        if not in_half.largest < float("inf"):
            raise NumericalError(
                f"export: the logits of {name} in half precision are not finite. Use export.dtype=bf16"
            )


def _in_half(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda row: model(row).logits


def loaded(directory: Path, layout: Layout, dtype: torch.dtype) -> Any:
    """The directory's model as transformers loads it, without a network. It runs no code but that of the layout."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=bool(layout.files()),
        )
    finally:
        if was_on:
            logging.enable_progress_bar()
    return model.eval()
