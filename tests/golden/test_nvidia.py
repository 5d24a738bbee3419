"""Numbers that NVIDIA's public nGPT code gives for weights written as a formula.

nvidia.json holds them, computed once in fp64 from github.com/NVIDIA/ngpt (commit ed19eb2, model.py) with its attention
on scaled_dot_product_attention and its rotary embedding, which is none, replaced by the usual half-split one.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ngpt_train.models import build_model, export_gradients, load_weights
from tests.properties.architectures import ARCHITECTURES, Size, config, shapes

SIZE = Size(d_model=24, n_layers=3, n_heads=3, vocab_size=47, n_kv_heads=3, d_mlp=96)


def formula_weights(table: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A chirp: as good as noise, and the same on every machine and in every version of torch."""
    weights = {}
    for index, (name, shape) in enumerate(sorted(table.items())):
        k = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        wave = torch.sin(0.37 * k * k + index).view(shape)
        if len(shape) == 2:
            weights[name] = wave / wave.norm(dim=-1, keepdim=True)
        elif name == "s_z":
            weights[name] = 2 + 0.2 * wave
        else:
            weights[name] = (1 if "norm" in name or name.endswith((".s_u", ".s_v")) else 0.2) * (1 + 0.5 * wave)
    return weights


def batch() -> tuple[Tensor, Tensor]:
    k = torch.arange(2 * 17)
    row = (k * k * 5 + 3 * k) % SIZE.vocab_size
    return row.view(2, 17)[:, :-1], row.view(2, 17)[:, 1:]


@pytest.mark.parametrize("name", ["gpt", "ngpt"])
def test_public_numbers(name: str) -> None:
    expected = json.loads(Path(__file__).with_name("nvidia.json").read_text())[name]
    model = build_model(config(ARCHITECTURES[name], SIZE)).double()
    load_weights(model, formula_weights(shapes(ARCHITECTURES[name], SIZE)))
    tokens, targets = batch()
    assert model(tokens)[1, -1, :5].tolist() == pytest.approx(expected["logits"], rel=1e-10)
    loss, n_tokens = model.loss(tokens, targets)
    mean = loss / n_tokens
    assert mean.item() == pytest.approx(expected["loss"], rel=1e-12)
    mean.backward()
    norms = {key: x.norm().item() for key, x in export_gradients(model).items()}
    if name == "ngpt":
        # Theirs normalises h once more before each update: the same value, but no radial gradient for the embedding.
        del norms["embedding"]
    assert norms == pytest.approx(expected["gradient_norms"], rel=1e-10)
