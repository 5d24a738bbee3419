"""What the normalisation of nGPT makes irrelevant, and what it must not."""

import pytest
import torch

from ngpt_train.models import load_weights
from tests.properties.architectures import ARCHITECTURES, SMALL, jittered, random_batch


@pytest.mark.parametrize("name", ["wq", "wk", "wo", "w_u", "w_down", "s_u", "wv"])
def test_length_does_not_matter(name: str) -> None:
    """What a normalisation follows can be scaled by any positive number."""
    assert change_of_logits(name, 7.0) < 1e-12


@pytest.mark.parametrize("name", ["alpha_attn", "alpha_mlp"])
def test_sign_of_alpha_does_not_matter(name: str) -> None:
    assert change_of_logits(name, -1.0) == 0


@pytest.mark.parametrize("name", ["s_v", "w_v", "s_qk", "alpha_attn", "alpha_mlp", "s_z", "output"])
def test_what_does_matter(name: str) -> None:
    assert change_of_logits(name, 1.1) > 1e-3


def change_of_logits(name: str, factor: float) -> float:
    """Largest change, relative to the largest logit, when `name` is multiplied in every layer."""
    model, weights = jittered(ARCHITECTURES["ngpt"], SMALL)
    tokens, _ = random_batch(SMALL, 2, 16)
    with torch.no_grad():
        before = model(tokens)
        load_weights(model, {key: x * factor if key.split(".")[-1] == name else x for key, x in weights.items()})
        return ((model(tokens) - before).abs().max() / before.abs().max()).item()
