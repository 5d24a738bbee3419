"""`generate`: text from a checkpoint."""

from collections.abc import Sequence

import torch

from ngpt_train.config.schema import Config, ConfigError
from ngpt_train.distributed import join_world
from ngpt_train.evaluation import generate
from ngpt_train.evaluation.restore import restore


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints the prompt and its continuation on the standard output."""
    world = join_world(config)
    if world.size > 1:
        raise ConfigError("generate runs in one process; start it without torchrun")
    restored = restore("generate.checkpoint", config.generate.checkpoint, config.train.precision, world)
    tokenizer = restored.tokenizer
    # A document starts after the end of the one before it.
    prompt = [tokenizer.eos, *tokenizer.encode_batch([config.generate.prompt])[0].tolist()]
    tokens = torch.tensor(prompt, device=world.device)
    new = generate(restored.model, tokens, config.generate, tokenizer.eos, tokenizer.vocab_size)
    print(tokenizer.decode([*prompt[1:], *new.tolist()]))
    return 0
