"""Continues prompts with text, which comes in whole characters and without a part of a stop string."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from ngpt_train.config.sections.verbs import GenerateConfig
from ngpt_train.config.validate import mistake
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.evaluation.sampling import Row, continue_rows, opened, row_of
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.decoding import Recomputed, cached

logger = logging.getLogger(__name__)

# Escapes in generate.stop, because strings of a shell and of YAML have no new line.
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
# `Tokenizer.decode` returns it for bytes that are no character. At the end of a text the character may be incomplete.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation."""

    prompt: str
    sample: int
    text: str  # the continuation up to a stop string
    tokens: list[int]  # all generated tokens, also of the stop string, without eos
    logprobs: list[float]  # of the tokens: see Row
    end: str  # the reason: see Row

    def json(self, config: GenerateConfig) -> dict[str, Any]:
        """A line of generate.out."""
        sample = {"sample": self.sample} if config.samples > 1 else {}
        logprobs = {"logprobs": self.logprobs} if config.logprobs else {}
        return {"prompt": self.prompt, **sample, "text": self.text, "end": self.end, "tokens": self.tokens, **logprobs}


class Texts:
    """Continues prompts with a model, by the keys generate.*."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, config: GenerateConfig, compiled: bool = False) -> None:
        """compiled: the decoder's blocks are compiled; all batches then have equally many rows."""
        self.model, self.tokenizer, self.config, self.compiled = model.eval(), tokenizer, config, compiled
        self.reader = cached(model, compiled) if config.cache else Recomputed(model)
        self.stops = [re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], stop) for stop in config.stop or []]

    def of(self, prompts: Sequence[str], show: Callable[[str], object] | None = None) -> Iterator[Text]:
        """Yields generate.samples texts of each prompt, in order; generate.batch_rows are generated together.

        show: called with the prompt, then with each piece of a single text at once. Raises ConfigError before the first
        text if generate.overflow refuses a prompt.
        """
        ids = [self.tokenizer.encode(prompt).tolist() for prompt in prompts]
        tokens = [opened(self.model, self.tokenizer, prompt) for prompt in ids]
        self.check_room(tokens)
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
        """The prompt after encoding and decoding; for example, words lose the spaces around them."""
        return self.tokenizer.decode(self.tokenizer.encode(prompt).tolist())

    def continue_batch(
        self, rows: Sequence[Row], coming: Sequence[ComingText], show: Callable[[str], object] | None, n_rows: int
    ) -> None:
        """Continues the rows and `coming` to their ends. Compiled code always gets n_rows rows, some of them ended."""

        def stops(number: int, token: int) -> bool:
            piece = coming[number].add(token)
            if show is not None:
                show(piece)
            return coming[number].stopped

        more = [replace(rows[0], end="length") for _ in range(n_rows - len(rows))] if self.compiled else []
        continue_rows(self.reader, [*rows, *more], self.config, self.tokenizer, stops)
        for text in coming:
            rest = text.end()
            if show is not None:
                show(rest)

    def check_room(self, prompts: Sequence[Tensor]) -> None:
        """Logs or refuses a text that may become longer than the context."""
        config = self.model.config
        source = config.source_length(config.context)  # 0 for a decoder
        room, most_new = config.context - source, self.config.most_sampled
        for line, prompt in enumerate(prompts, 1):
            # No model reads the last token of a text. An encoder-decoder's decoder reads the last token of the prompt.
            encoded, decoded = (len(prompt) - 1, most_new) if source else (0, len(prompt) + most_new - 1)
            if encoded <= source and decoded <= room:
                continue
            where = "" if self.config.prompts is None else f" in line {line} of {self.config.prompts}"
            sees = f"{source} tokens of a prompt and {room} of the text after it" if source else f"{room} tokens"
            told = f"the prompt{where} has {len(prompt)} tokens, and generate.max_new_tokens={most_new} may follow"
            if self.config.overflow == "refuse":
                fix = "Shorten the prompt, set generate.max_new_tokens lower, or generate.overflow=slide"
                raise mistake(f"generate.overflow=refuse: {told}, but the model sees {sees}", fix)
            logger.info("%s; the model sees the last %s, computed again for each token beyond them", told, sees)
            return


class ComingText:
    """The continuation of a prompt. `add` and `end` return its pieces, which together are `text`.

    Without a stop string the prompt's text and `text` equal the decoded tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.ids = list(prompt)
        # The tokens before `whole` are whole characters, in the prompt or in `text`. A token's text may depend on the
        # token before it, so decoding begins at `begin`, an earlier end of whole characters.
        self.begin, self.whole = 0, len(self.ids)
        self.text = ""  # up to a stop string
        self.stopped = False
        self.n_given = 0  # characters of `text` that `add` and `end` have returned

    def add(self, token: int) -> str:
        """Returns the characters that are certain after this token."""
        self.ids.append(token)
        more = self.undecided()
        if more and not more.endswith(REPLACEMENT):
            self.begin, self.whole = self.whole, len(self.ids)
            self.append(more)
        return self.give(len(self.text) - (0 if self.stopped else self.held_back()))

    def end(self) -> str:
        """Returns the rest of the text, after the last token."""
        if not self.stopped:
            self.append(self.undecided())
        return self.give(len(self.text))

    def undecided(self) -> str:
        """The text of the tokens from `whole` on."""
        before = self.tokenizer.decode(self.ids[self.begin : self.whole])
        return self.tokenizer.decode(self.ids[self.begin :])[len(before) :]

    def append(self, more: str) -> None:
        self.text += more
        if found := [place for stop in self.stops if (place := self.text.find(stop, self.n_given)) >= 0]:
            self.text, self.stopped = self.text[: min(found)], True

    def held_back(self) -> int:
        """The number of last characters that may begin a stop string."""
        lengths = [n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
        return max(lengths, default=0)

    def give(self, end: int) -> str:
        """The text from the last return up to `end`."""
        end = max(end, self.n_given)
        given = self.text[self.n_given : end]
        self.n_given = end
        return given
