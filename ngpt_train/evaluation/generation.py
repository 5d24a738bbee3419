"""Sampling text from a model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.config.verb_keys import GenerateConfig
from ngpt_train.models import Decoder
from ngpt_train.training.guards import NumericalError


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, config: GenerateConfig, eos: int, vocab_size: int) -> Tensor:
    """The tokens `(n,)` int64 with which `model` continues `prompt`: n <= max_new_tokens, without eos, where they end.

    prompt: `(T,)` int64, T >= 1, on the model's device. The model sees the last `context` tokens.
    vocab_size: that of the tokenizer; the model's may be larger, and no id beyond it is sampled.
    Raises NumericalError for logits that are not finite.
    The same seed gives the same tokens, on every device up to rounding of the logits.
    """
    model.eval()
    # A generator of the CPU, so that a seed gives the same random numbers on every device.
    generator = torch.Generator().manual_seed(config.seed)
    new = prompt[:0]
    for _ in range(config.max_new_tokens):
        logits = model.next_token_logits(prompt, new)[:vocab_size]
        if not logits.isfinite().all():
            raise NumericalError("the model's logits are not finite: its weights are NaN or far too large")
        token = sample(logits.cpu(), config, generator)
        if token == eos:
            break
        new = torch.cat([new, new.new_tensor([token])])
    return new


def sample(logits: Tensor, config: GenerateConfig, generator: torch.Generator) -> int:
    """Samples an id from logits `(V,)`: temperature, then top-k, then top-p. Temperature 0 takes the largest logit."""
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
    return int(torch.multinomial(probabilities, 1, generator=generator))
