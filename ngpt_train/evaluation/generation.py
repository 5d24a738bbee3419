"""Sampling text from a model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.config.schema import GenerateConfig
from ngpt_train.models import Decoder


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, config: GenerateConfig, eos: int, vocab_size: int) -> Tensor:
    """The tokens that `model` continues `prompt` with, `(n,)` int64, n <= max_new_tokens, up to eos.

    prompt: `(T,)` int64, T >= 1, on the model's device. The model sees the last `context` tokens.
    vocab_size: of the tokenizer; the model's may be padded beyond it.
    The same seed gives the same text.
    """
    model.eval()
    # Drawn on the CPU, so that a seed means the same on every device.
    generator = torch.Generator().manual_seed(config.seed)
    new = prompt[:0]
    for _ in range(config.max_new_tokens):
        logits = model.next_token_logits(prompt, new)[:vocab_size]
        token = sample(logits.cpu(), config, generator)
        if token == eos:
            break
        new = torch.cat([new, new.new_tensor([token])])
    return new


def sample(logits: Tensor, config: GenerateConfig, generator: torch.Generator) -> int:
    """One token from logits `(V,)`: temperature, then top-k, then top-p."""
    if config.temperature == 0:
        return int(logits.argmax())
    logits = logits / config.temperature
    if config.top_k is not None and config.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(config.top_k).values[-1], -torch.inf)
    probabilities = F.softmax(logits, dim=-1)
    if config.top_p is not None:
        ordered, indices = probabilities.sort(descending=True)
        # A token stays if those before it do not reach p: the first one always does.
        dropped = ordered.cumsum(0) - ordered >= config.top_p
        probabilities[indices[dropped]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
