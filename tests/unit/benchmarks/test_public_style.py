"""What ours is compared with computes the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper_steps import build, public_steps
from benchmarks.public_style import PublicSteps, PublicStyle, as_public
from ngpt_train.models import build_model
from ngpt_train.models.ngpt.keys import NGPTConfig
from ngpt_train.models.weights import export_gradients, export_weights

CONFIG = NGPTConfig("ngpt", 64, 2, 2, None, 256, 512, 32)


def both(dtype: torch.dtype) -> tuple[torch.nn.Module, PublicStyle]:
    """Ours, with every scale moved away from its start, and the other of the same weights."""
    ours = build_model(CONFIG, seed=1).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim == 1:
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    ours.project_()  # in fp32 lengths were 1 to 1e-8
    public = PublicStyle(CONFIG, dtype).to(dtype)
    public.load_state_dict(as_public(export_weights(ours)))
    return ours, public


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(512, (3, 33), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_same_function(dtype: torch.dtype, tolerance: float) -> None:
    """Ours is compared with less work, or more, than the same function: a scale, a norm or a transpose is missing.

    Its norm of the embedding, which is of length 1, changes the part of the gradient along it, and nothing else.
    """
    ours, public = both(dtype)
    loss_sum, count = ours.loss(*batch())
    (loss_sum / count).backward()
    loss = public(*batch())
    loss.backward()
    assert loss.item() == pytest.approx((loss_sum / count).item(), rel=tolerance)
    expected = as_public(export_gradients(ours))
    found = {name: parameter.grad for name, parameter in public.named_parameters()}
    assert found.keys() == expected.keys()
    rows = public.embedding.weight.detach()
    for gradients in (expected, found):
        gradient = gradients["embedding.weight"]
        gradients["embedding.weight"] = gradient - rows * (rows * gradient).sum(1, keepdim=True)
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < tolerance * expected[name].norm(), name


def test_steps_stay_on_the_sphere() -> None:
    """Rows and columns are mixed up, so that matrices are normalised along the other dimension; nothing is learned."""
    _, public = both(torch.float32)
    tokens, targets = batch()
    run = PublicSteps(public, 0.01, [(tokens[:1], targets[:1]), (tokens[1:2], targets[1:2])])
    assert run() == 64
    run()
    for name, parameter in public.named_parameters():
        if parameter.ndim == 2:
            dim = 0 if name.endswith(("out.weight", "down.weight")) else 1
            torch.testing.assert_close(parameter.norm(dim=dim), torch.ones(parameter.shape[1 - dim]))
    assert run.losses[1] < run.losses[0]


def test_same_steps() -> None:
    """What is timed learns otherwise: another rate or share of a micro batch, no projection."""
    ngpt = build("ngpt", "debug:32", "cpu")
    public = public_steps(ngpt, 2)
    for _ in range(5):
        assert public() == ngpt() == 8 * 32
    assert ngpt.losses[-1] < 0.9 * ngpt.losses[0]
    torch.testing.assert_close(
        torch.stack(public.losses).double(), torch.stack(ngpt.losses).double(), rtol=1e-3, atol=0
    )
