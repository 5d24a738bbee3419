"""`generate`: text from a checkpoint's model."""

import os
from collections.abc import Sequence

import torch

from ngpt_train.config.schema import Config
from ngpt_train.distributed import World, resolve_device
from ngpt_train.evaluation import generate
from ngpt_train.evaluation.restore import find_trained, restore


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints the prompt and its continuation on stdout; returns 0. Under torchrun rank 0 alone works.

    Raises ConfigError for an override that contradicts the checkpoint, DataError where there is no usable checkpoint.
    """
    if os.environ.get("RANK", "0") != "0":
        return 0
    trained = find_trained("generate", config, overrides)
    world = World(rank=0, size=1, local_rank=0, device=resolve_device(config.train.device, local_rank=0))
    restored = restore(trained, config, world)
    tokenizer = restored.tokenizer
    prompt = tokenizer.encode(config.generate.prompt).tolist()
    # As in training: a decoder reads an eos before each document, an encoder reads a document from its first token on.
    without_eos = prompt and restored.config.data.objective == "prefix_continuation"
    tokens = torch.tensor(prompt if without_eos else [tokenizer.eos, *prompt], device=world.device)
    new = generate(restored.model, tokens, config.generate, tokenizer.eos, tokenizer.vocab_size)
    print(tokenizer.decode([*prompt, *new.tolist()]))
    return 0
