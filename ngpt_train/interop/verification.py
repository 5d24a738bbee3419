"""Compares an exported directory with its model, through the programs that read it.

All arithmetic is in fp32 on the CPU. For an export in bf16 or fp16 the model's own weights are rounded first, so the
difference is only the rounding of fp32.
"""

import runpy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import in_one_line
from ngpt_train.interop.layouts.layout import Json, Layout, Tensors
from ngpt_train.interop.layouts.llama import logits_of_transformers
from ngpt_train.interop.safetensors_files import read_tensors
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.training.guards import NumericalError

# The largest difference of logits from rounding, divided by the largest logit. Each operation rounds by 2^-24. RoPE's
# angles in fp32 are off by up to T 2^-24 rad. A sharp softmax multiplies both by the size of its scores. Large random
# weights gave 1e-4, trained ones 1e-6. A misnamed or transposed weight, or wrong pairs, change logits completely.
TOLERANCE = 1e-3
LONGEST = 1024  # most tokens of a row
AUTO_MODELS = {
    "next_token": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "translation": "AutoModelForSeq2SeqLM",
}
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
    """Random ids `(n_rows, T)`, the same for each call."""
    assert isinstance(config.vocab_size, int)
    length = min(config.context, LONGEST)
    return torch.randint(config.vocab_size, (n_rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def difference(rows: Tensor, one: Callable[[Tensor], Any], other: Callable[[Tensor], Any]) -> Difference:
    """The difference between the logits of `one` and `other` for rows `(N, T)`, one row at a time."""
    largest = scale = 0.0
    for row in rows.split(1):
        a, b = one(row).float(), other(row).float()
        # torch keeps a NaN, Python's max may lose it.
        largest = float(torch.stack([torch.tensor(largest), (a - b).abs().max()]).max())
        scale = max(scale, float(b.abs().max()))
    return Difference(largest, scale)


def check_bits(directory: Path, layout: Layout, config_json: Json, weights: Tensors, written: Tensors) -> str:
    """Reads the directory back and compares each weight bit for bit. Raises NumericalError if one differs.

    written: the tensors of the directory's files, which are compared if the layout does not return weights.
    """
    back, wanted = read_tensors(directory), written
    if layout.returns:
        (_, back), wanted = layout.from_foreign(config_json, back), weights
    _same(back, wanted, "the written files give other weights")
    return f"written tensors read back: all {len(wanted)} weights equal, bit for bit"


def check_reader(directory: Path, weights: Tensors) -> str:
    """Runs the exported read_weights.py, and compares each weight. Raises NumericalError if one differs."""
    read = runpy.run_path(str(directory / "read_weights.py"))["read"]
    found = {name: torch.from_numpy(values.copy()).float() for name, values in read(directory).items()}
    _same(found, weights, "read_weights.py gives other weights")
    return f"read_weights.py reads the same {len(weights)} tensors, bit for bit"


def _same(found: Tensors, wanted: Tensors, problem: str) -> None:
    names = found.keys() ^ wanted.keys()
    names |= {name for name in wanted.keys() & found.keys() if not torch.equal(wanted[name].float(), found[name])}
    if names:
        raise NumericalError(f"export: {problem}: {', '.join(sorted(names)[:5])}. Nothing was exported")


def check_logits(
    directory: Path, layout: Layout, model: torch.nn.Module, weights: Tensors, rows: Tensor, dtype: torch.dtype
) -> Iterator[str]:
    """Loads the directory with transformers, and compares its logits with ours. Yields sentences of the output. model:
    ours, with rounded weights. Raises NumericalError if the difference is more than rounding."""
    if find_spec("transformers") is None:
        yield f"logits not compared: transformers is not installed ({EXTRA})"
        return
    config = model.config
    try:
        exported = loaded(directory, layout, torch.float32)
    except ImportError as error:  # transformers is too old for the modeling file, or broken
        yield f"logits not compared: transformers cannot be used ({in_one_line(error)}); {EXTRA} installs a new one"
        return

    def logits(row: Tensor, one: Any = exported) -> Tensor:
        if layout.objective != "translation":
            return one(row).logits
        source, translation = row.chunk(2, dim=1)
        return one(source, decoder_input_ids=translation).logits

    with_ours = difference(rows, logits, model)
    n, length = rows.shape
    name = type(exported).__name__
    if not with_ours.largest <= TOLERANCE * with_ours.scale:
        problem = f"the logits of {name} differ by {with_ours}; rounding explains {TOLERANCE:g} of the largest"
        raise NumericalError(f"export: {problem}. Nothing was exported: please report this")
    read = f"{n} rows of {length} random ids in fp32"
    if isinstance(config, GPTConfig):
        float_weights = {key: weight.float() for key, weight in weights.items()}
        exact = difference(rows, logits, lambda row: logits_of_transformers(float_weights, config, row))
        yield f"{read}, {name} and the checkpoint, in the same order of operations: {LARGEST} {exact}"
        if exact.largest:
            import transformers

            yield f"  0 was expected; transformers {transformers.__version__} may compute in another order"
    yield f"{read}, {name} and ngpt-train, whose order is another: {LARGEST} {with_ours}, which is rounding"
    if dtype != torch.float32:
        half = loaded(directory, layout, dtype)
        in_half = difference(rows, lambda row: logits(row, half), model)
        yield f"the same rows, {name} in {str(dtype).removeprefix('torch.')} arithmetic: {LARGEST} {in_half}"
        if not in_half.largest < float("inf"):
            problem = f"the logits of {name} in half precision are not finite"
            raise NumericalError(f"export: {problem}. Use export.dtype=bf16")


def loaded(directory: Path, layout: Layout, dtype: torch.dtype) -> Any:
    """Loads the directory with transformers, without a network. Runs no code but the layout's modeling file."""
    import transformers
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        auto_model, trusted = getattr(transformers, AUTO_MODELS[layout.objective]), bool(layout.files)
        model = auto_model.from_pretrained(directory, dtype=dtype, local_files_only=True, trust_remote_code=trusted)
    finally:
        if was_on:
            logging.enable_progress_bar()
    return model.eval()
