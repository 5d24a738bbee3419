"""Continues a batch of prompts with tokens, which it samples from the logits.

Names, definitions and order of the options are the same as in Hugging Face's `generate`: repetition_penalty,
no_repeat_ngram_size, min_new_tokens, temperature, top_k, top_p, min_p.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.config.sections.verbs import GenerateConfig
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.decoding import Recomputed
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.training.guards import NumericalError

Stops = Callable[[int, int], bool]  # called with the number of a row and its new token; True ends the row


@dataclass
class Row:
    """A prompt and its continuation."""

    prompt: Tensor  # (P,) int64, P >= 1, on the model's device
    generator: torch.Generator  # of this row alone, so that other rows do not matter
    read: list[int]  # by the decoder; an encoder-decoder's reads the prompt's last token and the new ones
    new: list[int] = field(default_factory=list)
    # Natural logarithm of each new token's probability among all ids of the model, before temperature and all options.
    logprobs: list[float] = field(default_factory=list)
    # The reason: eos; stop; length (max_new_tokens); nothing_left (the options forbid every token).
    end: str | None = None

    def add(self, logits: Tensor, config: GenerateConfig, tokenizer: Tokenizer) -> None:
        """Samples a token of the tokenizer from logits `(V,)`, on the CPU, or sets `end`. The model may have more ids,
        which are never sampled. Raises NumericalError for logits that are not finite."""
        of_tokenizer = logits[: tokenizer.vocab_size]
        if not of_tokenizer.isfinite().all():
            raise NumericalError("the model's logits are not finite: its weights are NaN or far too large")
        allowed = restricted(of_tokenizer, self.read, len(self.new), config, tokenizer.eos)
        if (allowed == -torch.inf).all():
            self.end = "nothing_left"
            return
        token = sample(allowed, config, self.generator)
        if token == tokenizer.eos:
            self.end = "eos"
            return
        self.new.append(token)
        self.read.append(token)
        self.logprobs.append(logits.double().log_softmax(-1)[token].item())
        if len(self.new) == config.most_sampled:
            self.end = "length"


def opened(model: Decoder, tokenizer: Tokenizer, prompt: list[int]) -> Tensor:
    """The tokens of a prompt as the model reads it: `(P,)`, P >= 1, on its device."""
    # As in training: a decoder reads an eos before a document, an encoder does not.
    without_eos = prompt and model.config.objective == "prefix_continuation"
    return torch.tensor(prompt if without_eos else [tokenizer.eos, *prompt], device=model.embedding.device)


def row_of(model: Decoder, prompt: Tensor, seed: int) -> Row:
    """prompt: `(P,)` int64, P >= 1, on the model's device."""
    # On the CPU, so that a seed gives the same random numbers for every device.
    generator = torch.Generator().manual_seed(seed)
    read = prompt[-1:] if isinstance(model, EncoderDecoder) else prompt
    return Row(prompt, generator, read.tolist())


def continue_rows(
    reader: Recomputed, rows: Sequence[Row], config: GenerateConfig, tokenizer: Tokenizer, stops: Stops
) -> None:
    """Continues each row until it has an `end`. reader: computes the logits. Raises as `Row.add`."""
    logits = reader.begin([row.prompt for row in rows]).cpu()
    going_on = {number: row for number, row in enumerate(rows) if row.end is None}
    while going_on:
        tokens = {}
        for number, row in list(going_on.items()):
            n_before = len(row.new)
            row.add(logits[number], config, tokenizer)
            if len(row.new) > n_before and stops(number, row.new[-1]):
                row.end = "stop"
            if row.end is None:
                tokens[number] = row.new[-1]
            else:
                del going_on[number]
        if tokens:
            logits = reader.next(tokens).cpu()


def restricted(logits: Tensor, read: Sequence[int], n_new: int, config: GenerateConfig, eos: int) -> Tensor:
    """Applies the options against repetition and early ends to logits `(V,)`. A forbidden token gets -inf.

    read: all tokens that the decoder has read, also of the prompt. n_new: the number of generated ones.
    """
    logits = logits.clone()
    if config.repetition_penalty != 1:
        ids = torch.tensor(read).unique()
        scores = logits[ids]
        # Keskar et al. 2019, section 4.1, but by the sign of the logit, so a penalty above 1 always lowers it.
        logits[ids] = torch.where(scores < 0, scores * config.repetition_penalty, scores / config.repetition_penalty)
    if config.no_repeat_ngram_size:
        logits[completions(torch.tensor(read), config.no_repeat_ngram_size)] = -torch.inf
    if n_new < config.min_new_tokens:
        logits[eos] = -torch.inf
    return logits


def completions(read: Tensor, n: int) -> Tensor:
    """The tokens `(m,)` that would repeat an n-gram of `read` `(N,)`."""
    if len(read) < n:
        return read[:0]
    ngrams = read.unfold(0, n, 1)  # (N - n + 1, n)
    begins_like_the_end = (ngrams[:, :-1] == read[len(read) - n + 1 :]).all(-1)
    return ngrams[begins_like_the_end, -1]


def sample(logits: Tensor, config: GenerateConfig, generator: torch.Generator) -> int:
    """Samples an id from logits `(V,)`; one or more are finite. Temperature 0 takes the largest logit."""
    if config.temperature == 0:
        return int(logits.argmax())
    logits = logits / config.temperature
    if config.top_k is not None and config.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(config.top_k).values[-1], -torch.inf)
    probabilities = F.softmax(logits, dim=-1)
    if config.top_p is not None:
        ordered, indices = probabilities.sort(descending=True)
        # A token stays if the more probable ones sum to less than p. So the most probable one always stays.
        dropped = ordered.cumsum(0) - ordered >= config.top_p
        probabilities[indices[dropped]] = 0
    if config.min_p is not None:
        probabilities[probabilities < config.min_p * probabilities.max()] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
