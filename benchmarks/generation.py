"""Times a generated token at the end of a text of 256, 1,024 and 4,096 tokens.

    python -m benchmarks.generation [GROUP=OPTION ...] [KEY=VALUE ...] [--out FILE]

    kept          each token is read once, its keys and values are kept
    recomputed    the whole text is computed again for each token
    transformers  the exported model, in transformers with its DynamicCache

All run in turn in one process, one text, the most likely token each time; what comes before the last tokens is not
timed. On a GPU the blocks of `kept` are compiled.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Entry, Run, elapsed, interleaved, main
from ngpt_train.config import ConfigError, load_config
from ngpt_train.config.keys import AUTO
from ngpt_train.core.files import write_json
from ngpt_train.distributed.layouts import choose_kernels, resolve_precision
from ngpt_train.distributed.world import resolve_device
from ngpt_train.interop.exporting import rounded
from ngpt_train.interop.layouts import chosen_layout
from ngpt_train.interop.safetensors_files import FLOATS, write_tensors
from ngpt_train.interop.verification import loaded
from ngpt_train.models import Decoder, build_model, export_weights
from ngpt_train.models.decoding import cached
from ngpt_train.study.random_steps import with_vocabulary

LENGTHS = (256, 1024, 4096)
LAST = 16  # tokens of a run; of `recomputed` one, the last
ROUNDS = 5


def bench(overrides: Sequence[str]) -> Iterator[Entry]:
    """For each length the entries of a decoder whose context is that length, with random weights."""
    config = load_config(overrides, world_size=1)
    device = resolve_device(config.train.device, 0)
    precision = resolve_precision(config.train.precision, device.type)
    choose_kernels(config, device, precision)
    of = with_vocabulary(config).model
    if of.source_length(of.context):
        raise ConfigError(f"model.name={of.name}: only decoders are timed. Choose model=gpt or another")
    has_transformers = importlib.util.find_spec("transformers") is not None
    if not has_transformers:
        print("transformers is not installed: ngpt-train[hf]", flush=True)
    for length in LENGTHS:
        with device:
            model = build_model(replace(of, context=length)).eval()
        model.compute_dtype = precision
        text = torch.randint(int(of.vocab_size), (length,), generator=torch.Generator().manual_seed(0)).to(device)
        runs = {"kept": kept(model, text), "recomputed": recomputed(model, text)}
        if has_transformers and (exported := in_transformers(model, precision)) is not None:
            runs["transformers"] = by_transformers(exported.to(device), text)
        yield from interleaved(runs, "kept", ROUNDS, "tokens", elapsed(device), f"{of.name}, {length} tokens: ")


def in_transformers(model: Decoder, dtype: torch.dtype) -> Any:
    """The model as transformers loads its export, on the CPU, its weights rounded to `dtype`; None where no class of
    transformers has it."""
    layout = chosen_layout(AUTO, model.config)
    if layout.name == "safetensors":
        return None
    with TemporaryDirectory() as directory:
        work = Path(directory)
        weights = rounded(export_weights(model), FLOATS[dtype])
        write_tensors(work, layout.to_foreign(weights, model.config), float("inf"))
        write_json(work / "config.json", layout.config_json(model.config))
        for path in layout.files:
            shutil.copyfile(path, work / path.name)
        return loaded(work, layout, dtype)


def kept(model: Decoder, text: Tensor) -> Run:
    """The last tokens of text `(T,)`, from the keys and values of those before them."""
    compiled = text.device.type == "cuda"
    if compiled:
        for block in model.layers:
            block.compile(dynamic=False)
    reader = cached(model, compiled)
    before = text[:-LAST]
    first = int(reader.begin([before])[0].argmax())

    def run() -> float:
        reader.new, reader.n_kept = [[]], [len(before)]  # what an earlier run has kept is hidden, and replaced
        token = first
        for _ in range(LAST):
            token = int(reader.next({0: token})[0].argmax())
        return LAST

    return run


def recomputed(model: Decoder, text: Tensor) -> Run:
    def run() -> float:
        with torch.compiler.set_stance("force_eager"):
            int(model.next_token_logits(text, text[:0]).argmax())
        return 1

    return run


def by_transformers(model: Any, text: Tensor) -> Run:
    """As `kept`, by a model of transformers with its own cache."""
    from transformers import DynamicCache

    before, cache = text[None, :-LAST], DynamicCache()

    @torch.no_grad()
    def next_of(tokens: Tensor) -> Tensor:
        """The most likely token `(1, 1)` after tokens `(1, T)`."""
        return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    first = next_of(before)

    def run() -> float:
        if later := cache.get_seq_length() - before.shape[1]:
            cache.crop(-later)  # what an earlier run has added
        token = first
        for _ in range(LAST):
            token = next_of(token)
            token.item()  # as `kept` does, which reads each token on the host
        return LAST

    return run


if __name__ == "__main__":
    sys.exit(main(__doc__, bench))
