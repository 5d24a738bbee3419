"""Texts that continue prompts."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.sections.generation import GenerateConfig
from ngpt_train.core.errors import ConfigError
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.evaluation.generation.coming_text import ComingText
from ngpt_train.evaluation.generation.tokens import Row, continue_rows, reader_of, row_of
from ngpt_train.models.decoder import Decoder

logger = logging.getLogger(__name__)

# Of generate.stop, as they are typed. A string of a shell or of YAML has no new line.
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation."""

    prompt: str
    sample: int
    text: str  # the continuation, which ends before a stop string
    tokens: list[int]  # those that were generated, a stop string's too, without eos
    logprobs: list[float]  # of the tokens: see Row
    end: str  # why it ended: see Row

    def json(self, config: GenerateConfig) -> dict[str, Any]:
        """The content of a line of generate.out."""
        sample = {"sample": self.sample} if config.samples > 1 else {}
        logprobs = {"logprobs": self.logprobs} if config.logprobs else {}
        return {"prompt": self.prompt, **sample, "text": self.text, "end": self.end, "tokens": self.tokens, **logprobs}


class Texts:
    """Continues prompts by a model, as generate.* says."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, config: GenerateConfig, compiled: bool = False) -> None:
        """compiled: whether the blocks of the decoder are; all batches then have as many rows."""
        self.model, self.tokenizer, self.config, self.compiled = model.eval(), tokenizer, config, compiled
        self.reader = reader_of(model, config, compiled)
        self.stops = [re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], stop) for stop in config.stop or []]

    def of(
        self, prompts: Sequence[str], show: Callable[[str], object] | None = None, first_line: int | None = None
    ) -> Iterator[Text]:
        """The texts of each prompt, generate.samples of them, in order; generate.batch_rows at a time.

        show: called with the pieces of a single text as they come, its prompt first. first_line: number of the first
        prompt's line in its file, for messages. Raises ConfigError where generate.overflow refuses a prompt, before
        anything is generated.
        """
        ids = [self.tokenizer.encode(prompt).tolist() for prompt in prompts]
        tokens = [self.opened(prompt) for prompt in ids]
        self.check_room(tokens, first_line)
        wanted = iter([(number, sample) for number in range(len(prompts)) for sample in range(self.config.samples)])
        n_rows = min(self.config.batch_rows, len(prompts) * self.config.samples)
        while batch := list(islice(wanted, n_rows)):
            rows = [row_of(self.model, tokens[number], self.config.seed + sample) for number, sample in batch]
            coming = [ComingText(self.tokenizer, ids[number], self.stops) for number, _ in batch]
            if show is not None:
                show(self.as_read(prompts[0]))
            self.continue_batch(rows, coming, show, n_rows)
            for (number, sample), row, text in zip(batch, rows, coming, strict=True):
                assert row.end is not None
                end = "stop" if text.stopped else row.end
                yield Text(prompts[number], sample, text.text, row.new, row.logprobs, end)

    def as_read(self, prompt: str) -> str:
        """The prompt as its tokens have it: words, for example, lose the spaces around them."""
        return self.tokenizer.decode(self.tokenizer.encode(prompt).tolist())

    def opened(self, prompt: list[int]) -> Tensor:
        """The tokens `(P,)`, P >= 1, that the model reads of a prompt."""
        # As in training: a decoder reads an eos before each document, an encoder a document from its first token on.
        without_eos = prompt and self.model.config.objective == "prefix_continuation"
        read = prompt if without_eos else [self.tokenizer.eos, *prompt]
        return torch.tensor(read, device=self.model.embedding.device)

    def continue_batch(
        self, rows: Sequence[Row], coming: Sequence[ComingText], show: Callable[[str], object] | None, n_rows: int
    ) -> None:
        """Continues the rows to their ends, and `coming` with them. Compiled code gets n_rows rows, ended ones too."""

        def stops(number: int, token: int) -> bool:
            piece = coming[number].add(token)
            if show is not None:
                show(piece)
            return coming[number].stopped

        more = [replace(rows[0], end="length") for _ in range(n_rows - len(rows))] if self.compiled else []
        vocabulary = self.tokenizer.eos, self.tokenizer.vocab_size
        continue_rows(self.reader, [*rows, *more], self.config, *vocabulary, stops)
        for text in coming:
            rest = text.end()
            if show is not None:
                show(rest)

    def check_room(self, prompts: Sequence[Tensor], first_line: int | None) -> None:
        """Says that texts may outgrow the context, or refuses them."""
        config = self.model.config
        source = config.source_length(config.context)  # 0 for a decoder
        room, most_new = config.context - source, self.config.max_new_tokens
        for number, prompt in enumerate(prompts):
            # The last token of a text is not read, and of a prompt an encoder-decoder's decoder reads the last one.
            encoded, decoded = (len(prompt) - 1, most_new) if source else (0, len(prompt) + most_new - 1)
            if encoded <= source and decoded <= room:
                continue
            where = "" if first_line is None else f" in line {first_line + number} of {self.config.prompts}"
            sees = f"{source} tokens of a prompt and {room} of the text after it" if source else f"{room} tokens"
            told = f"the prompt{where} has {len(prompt)} tokens, and generate.max_new_tokens={most_new} may follow"
            if self.config.overflow == "refuse":
                fix = "Shorten the prompt, set generate.max_new_tokens lower, or generate.overflow=slide"
                raise ConfigError(f"generate.overflow=refuse: {told}, but the model sees {sees}\n  {fix}")
            logger.info("%s; the model sees the last %s, computed again for each token beyond them", told, sees)
            return
