"""The next token, from the logits of all.

Names and definitions are those of Hugging Face's `generate`, and so is their order: repetition_penalty,
no_repeat_ngram_size, min_new_tokens, temperature, top_k, top_p, min_p.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.config.sections.generation import GenerateConfig


def restricted(logits: Tensor, read: Sequence[int], n_new: int, config: GenerateConfig, eos: int) -> Tensor:
    """logits `(V,)` with the options against repetition and early ends; -inf for a token that is forbidden.

    read: all tokens that the decoder has read, those of the prompt too. n_new: how many of them are generated.
    """
    logits = logits.clone()
    if config.repetition_penalty != 1:
        ids = torch.tensor(read).unique()
        scores = logits[ids]
        # Keskar et al. 2019, section 4.1, with the sign of the logit heeded: a penalty above 1 always lowers it.
        logits[ids] = torch.where(scores < 0, scores * config.repetition_penalty, scores / config.repetition_penalty)
    if config.no_repeat_ngram_size:
        logits[completions(torch.tensor(read), config.no_repeat_ngram_size)] = -torch.inf
    if n_new < config.min_new_tokens:
        logits[eos] = -torch.inf
    return logits


def completions(read: Tensor, n: int) -> Tensor:
    """The tokens `(m,)` that would complete an n-gram which `read` `(N,)` has already."""
    if len(read) < n:
        return read[:0]
    ngrams = read.unfold(0, n, 1)  # (N - n + 1, n)
    begins_like_the_end = (ngrams[:, :-1] == read[len(read) - n + 1 :]).all(-1)
    return ngrams[begins_like_the_end, -1]


def sample(logits: Tensor, config: GenerateConfig, generator: torch.Generator) -> int:
    """Samples an id from logits `(V,)`, of which one at least is finite. Temperature 0 takes the largest logit."""
    if config.temperature == 0:
        return int(logits.argmax())
    logits = logits / config.temperature
    if config.top_k is not None and config.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(config.top_k).values[-1], -torch.inf)
    probabilities = F.softmax(logits, dim=-1)
    if config.top_p is not None:
        ordered, indices = probabilities.sort(descending=True)
        # A token stays if the more probable ones sum to less than p; so the most probable one always stays.
        dropped = ordered.cumsum(0) - ordered >= config.top_p
        probabilities[indices[dropped]] = 0
    if config.min_p is not None:
        probabilities[probabilities < config.min_p * probabilities.max()] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
