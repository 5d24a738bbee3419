"""anGPT's constants: what they promise at the start, where rows are independent directions."""

import math
from typing import Any

import pytest
import torch

from ngpt_train.config import load_config
from ngpt_train.models import build_model
from ngpt_train.models.angpt.model import nu, root_mean_square_of_silu, step
from tests.properties.architectures import ARCHITECTURES, Size, config, jittered
from tests.properties.test_ngpt import unit

SIZE = Size(256, n_layers=6, n_heads=4, vocab_size=512, n_kv_heads=2, d_mlp=512)


def test_nu() -> None:
    """1 where h stays or goes, sqrt(2) half way; a step of independent directions of length 1 has length 1."""
    found = nu(torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([1, 1, math.sqrt(2)], dtype=torch.float64))
    h, x = unit(2000, 256, 0), unit(2000, 256, 1)
    for alpha in (0.01, 0.3, 0.5, 0.9, -0.2):
        lengths = step(h, x, torch.full((256,), alpha, dtype=torch.float64)).norm(dim=1)
        assert lengths.square().mean().item() == pytest.approx(1, abs=0.01)


def test_the_recipe() -> None:
    """Caught: decay, warm-up or another schedule from the recipe below it, nGPT's initial alpha."""
    for scale in ("tiny", "125m"):
        found = load_config(["model=angpt", f"scale={scale}", "optim.lr=1e-3"])
        assert (found.optim.name, found.optim.weight_decay) == ("adam", 0)
        assert (found.schedule.kind, found.schedule.warmup_steps) == ("cosine", 0)
        assert found.model.alpha_attn.init == found.model.alpha_mlp.init == 0.01  # type: ignore[attr-defined]


def test_the_printed_constant_of_silu() -> None:
    """3.74 by the authors' sampling, for d_mlp = 4 d. Caught: a deviation of 1, the mean for the mean square."""
    assert 1 / root_mean_square_of_silu(0.5) == pytest.approx(3.74, rel=0.01)


@torch.no_grad()
@pytest.mark.parametrize("d_mlp", [512, 1024])
def test_lengths_at_the_start(d_mlp: int) -> None:
    """Of h after each step, of what the MLP suggests, and of what attention does that sees one token alone. Caught: a
    constant left out or squared, d_head for d, another d_mlp than 4 d forgotten."""
    model = build_model(config(ARCHITECTURES["angpt"], Size(256, 6, 4, 512, n_kv_heads=2, d_mlp=d_mlp)))
    tokens = torch.randperm(512)[None, :256]
    rope = model.rope(tokens, torch.float32)
    h = model.embedding[tokens]
    lengths = {"attention": [], "mlp": [], "h": []}  # type: dict[str, list[float]]
    for block in model.layers:
        layer: Any = block
        alone = layer.attention(h.transpose(0, 1), model.rope(tokens[:, :1], torch.float32), None)
        suggested = {"attention": alone, "mlp": layer.mlp(h), "h": (h := layer(h, rope, None))}
        for name, x in suggested.items():
            lengths[name].append(x.square().sum(-1).mean().sqrt().item())
    for name, tolerance in (("attention", 0.03), ("mlp", 0.03), ("h", 0.01)):
        assert lengths[name] == pytest.approx([1.0] * 6, abs=tolerance), name


@torch.no_grad()
def test_golden_loss() -> None:
    """Of weights drawn from a seed, in fp64. Caught: a change of the function that its reference shares."""
    model, _ = jittered(ARCHITECTURES["angpt"], SIZE)
    k = torch.arange(2 * 33)
    row = ((k * k * 5 + 3 * k) % SIZE.vocab_size).view(2, 33)
    loss, n_tokens = model.loss(row[:, :-1], row[:, 1:])
    assert (loss / n_tokens).item() == pytest.approx(6.2683760334, rel=1e-9)
