"""The tokens that continue several prompts, beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ngpt_train.config.sections.generation import GenerateConfig
from ngpt_train.evaluation.generation.sampling import restricted, sample
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.decoding import Recomputed, cached
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.training.guards import NumericalError


@dataclass
class Row:
    """A prompt, and the tokens that continue it."""

    prompt: Tensor  # (P,) int64, P >= 1, on the model's device
    generator: torch.Generator  # its own, so that the row does not depend on its neighbours
    read: list[int]  # what the decoder has read: of an encoder-decoder the prompt's last token, and the new ones
    new: list[int] = field(default_factory=list)
    # Natural logarithm of the probability that the model gives each new token, before temperature and all other
    # options, among all ids of the model.
    logprobs: list[float] = field(default_factory=list)
    # Why it ended: eos; stop; length, after max_new_tokens; nothing_left, where the options forbid every token.
    end: str | None = None

    def add(self, logits: Tensor, config: GenerateConfig, eos: int, vocab_size: int) -> None:
        """Samples a token from logits `(V,)`, on the CPU, of which the first `vocab_size` count; or ends."""
        if not logits[:vocab_size].isfinite().all():
            raise NumericalError("the model's logits are not finite: its weights are NaN or far too large")
        allowed = restricted(logits[:vocab_size], self.read, len(self.new), config, eos)
        if (allowed == -torch.inf).all():
            self.end = "nothing_left"
            return
        token = sample(allowed, config, self.generator)
        if token == eos:
            self.end = "eos"
            return
        self.new.append(token)
        self.read.append(token)
        self.logprobs.append(logits.double().log_softmax(-1)[token].item())
        if len(self.new) == config.max_new_tokens:
            self.end = "length"


def row_of(model: Decoder, prompt: Tensor, seed: int) -> Row:
    """prompt: `(P,)` int64, P >= 1, on the model's device."""
    # A generator of the CPU, so that a seed gives the same random numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    read = prompt[-1:] if isinstance(model, EncoderDecoder) else prompt
    return Row(prompt, generator, read.tolist())


def continue_rows(
    reader: Recomputed,
    rows: Sequence[Row],
    config: GenerateConfig,
    eos: int,
    vocab_size: int,
    stops: Callable[[int, int], bool] = lambda row, token: False,
) -> None:
    """Continues all rows that have no `end` until they have one.

    reader: gives the logits. vocab_size: of the tokenizer; the model's may be larger, and no id beyond it is sampled.
    stops(row, token): called for each new token; whether the row ends with it. Raises NumericalError for logits that
    are not finite.
    """
    logits = reader.begin([row.prompt for row in rows]).cpu()
    going_on = {number: row for number, row in enumerate(rows) if row.end is None}
    while going_on:
        tokens = {}
        for number, row in list(going_on.items()):
            n_before = len(row.new)
            row.add(logits[number], config, eos, vocab_size)
            if len(row.new) > n_before and stops(number, row.new[-1]):
                row.end = "stop"
            if row.end is None:
                tokens[number] = row.new[-1]
            else:
                del going_on[number]
        if tokens:
            logits = reader.next(tokens).cpu()


def reader_of(model: Decoder, config: GenerateConfig, compiled: bool = False) -> Recomputed:
    """The source of the logits, by generate.cache. compiled: whether the decoder's blocks are."""
    return cached(model, compiled) if config.cache else Recomputed(model)
