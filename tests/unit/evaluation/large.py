"""Models with weights so large that positions, tokens and texts matter, and a world of one process."""

import torch

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.distributed.world import World
from ngpt_train.models import Decoder, build_model

ALONE = World(0, 1, 0, torch.device("cpu"))


@torch.no_grad()
def large(config: ModelConfig, factor: float, seed: int = 0) -> Decoder:
    """Each matrix times `factor`; on the sphere, where matrices have their length, each scale vector."""
    model = build_model(config, seed)
    for parameter in model.parameters():
        parameter.mul_(factor if (parameter.ndim == 1) == model.on_sphere else 1)
    return model
