"""Times a generated token at the end of a text of 256, 1,024 and 4,096 tokens.

    kept          each token is read once, its keys and values are kept
    recomputed    the whole text is computed again for each token
    transformers  the exported model, in transformers with its DynamicCache

All run in turn in one process, one text, the most likely token each time; what comes before the last tokens is not
timed. On a GPU the time is wall-clock time and the blocks of `kept` are compiled. On a CPU it is the process's CPU
time, because other processes disturb wall-clock time.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ngpt_train.bench.interleaved import Entry, Run, by, interleaved
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import ConfigError
from ngpt_train.models import Decoder, build_model

LENGTHS = (256, 1024, 4096)
LAST = 16  # tokens of a run; of `recomputed` one, the last
ROUNDS = 5


def bench(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    in_transformers: Callable[[Decoder, torch.dtype], Any],
    lengths: tuple[int, ...] = LENGTHS,
    say: Callable[[str], None] = print,
) -> Iterator[Entry]:
    """For each length the entries of a decoder of `config`, whose context is that length, with random weights.

    dtype: of its activations. in_transformers: a decoder as transformers has it, in this dtype; None if it has not.
    """
    if config.source_length(config.context):
        raise ConfigError(f"model.name={config.name}: bench generation times decoders. Choose model=gpt or another")
    has_transformers = importlib.util.find_spec("transformers") is not None
    if not has_transformers:
        say("transformers is not installed: ngpt-train[hf]")
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    for length in lengths:
        with device:
            model = build_model(replace(config, context=length)).eval()
        model.compute_dtype = dtype
        text = torch.randint(int(config.vocab_size), (length,), generator=torch.Generator().manual_seed(0)).to(device)
        runs = {"kept": kept(model, text), "recomputed": recomputed(model, text)}
        if has_transformers and (exported := in_transformers(model, dtype)) is not None:
            runs["transformers"] = by_transformers(exported.to(device), text)
        named = {f"{config.name}, {length} tokens: {name}": run for name, run in runs.items()}
        yield from interleaved(named, next(iter(named)), ROUNDS, "tokens", by(clock))


def kept(model: Decoder, text: Tensor) -> Run:
    """The last tokens of text `(T,)`, from the keys and values of those before them."""
    compiled = text.device.type == "cuda"
    if compiled:
        for block in model.layers:
            block.compile(dynamic=False)
    reader = model.cached(compiled)
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
