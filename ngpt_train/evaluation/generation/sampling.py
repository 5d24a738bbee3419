"""Samples the next token from logits.

Names, definitions and order are the same as in Hugging Face's `generate`: repetition_penalty, no_repeat_ngram_size,
min_new_tokens, temperature, top_k, top_p, min_p.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.config.sections.verbs import GenerateConfig


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
