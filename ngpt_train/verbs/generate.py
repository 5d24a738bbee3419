"""`generate`: text from a checkpoint."""

import os
from collections.abc import Sequence

import torch

from ngpt_train.config.schema import Config
from ngpt_train.distributed import World, resolve_device
from ngpt_train.evaluation import generate
from ngpt_train.evaluation.restore import find_trained, restore


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints the prompt and its continuation on the standard output. Under torchrun rank 0 does it all.

    Raises ConfigError for an override that contradicts the checkpoint.
    """
    if os.environ.get("RANK", "0") != "0":
        return 0
    trained = find_trained("generate", config, overrides)
    world = World(rank=0, size=1, local_rank=0, device=resolve_device(config.train.device, local_rank=0))
    restored = restore(trained, config, world)
    tokenizer = restored.tokenizer
    prompt = tokenizer.encode_batch([config.generate.prompt])[0].tolist()
    # A document starts after the end of the one before it; an encoder reads documents from their first token on.
    bare = prompt and restored.config.data.objective == "prefix_continuation"
    tokens = torch.tensor(prompt if bare else [tokenizer.eos, *prompt], device=world.device)
    new = generate(restored.model, tokens, config.generate, tokenizer.eos, tokenizer.vocab_size)
    print(tokenizer.decode([*prompt, *new.tolist()]))
    return 0
