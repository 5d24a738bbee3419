"""Logits, loss and every gradient against the equations, with all weights away from their init."""

import pytest
import torch
from torch import Tensor

from tests.properties.architectures import (
    ARCHITECTURES,
    SMALL,
    VARIANTS,
    Architecture,
    Size,
    export_gradients,
    jittered,
    random_batch,
)
from tests.reference.attention import loss_sum

CASES = {
    "usual": (SMALL, 3, 9),
    "one head, odd vocabulary": (Size(10, 1, 1, 7, 1, 40), 2, 13),
    "grouped queries": (Size(24, 2, 4, 31, 2, 50), 2, 8),
    "one key head": (Size(24, 3, 6, 31, 1, 17), 2, 5),
    "one token": (SMALL, 4, 1),
    "longer": (Size(16, 2, 2, 97, 2, 64), 1, 65),
}


def error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest expected value (at least `floor`)."""
    assert actual.shape == expected.shape
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=floor)).item()


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "powernorm"])
def test_logits_loss_and_gradients(name: str, case: str, dtype: torch.dtype, documents: bool) -> None:
    check(ARCHITECTURES[name], case, dtype, documents)


@pytest.mark.parametrize("case", ["usual", "grouped queries"])
@pytest.mark.parametrize("name", VARIANTS)
def test_options(name: str, case: str) -> None:
    check(VARIANTS[name], case, torch.float64, documents=case == "usual")


def check(architecture: Architecture, case: str, dtype: torch.dtype, documents: bool) -> None:
    size, rows, t = CASES[case]
    model, weights = jittered(architecture, size, dtype)
    tokens, targets = random_batch(size, rows, t)
    doc_ids = (torch.rand(rows, t, generator=torch.Generator().manual_seed(1)) < 0.3).cumsum(1) if documents else None
    small, large = (1e-12, 1e-12) if dtype == torch.float64 else (1e-6, 1e-5)

    for x in weights.values():
        x.requires_grad_()
    logits = architecture.forward(weights, tokens, n_heads=size.n_heads, doc_ids=doc_ids)
    loss = loss_sum(logits, targets)
    loss.backward()

    if not documents:
        assert error(model(tokens).detach(), logits.detach()) < small
        assert model(tokens).dtype == dtype
    actual, n_tokens = model.loss(tokens, targets, doc_ids)
    assert int(n_tokens) == int((targets != -100).sum())
    assert actual.item() == pytest.approx(loss.item(), rel=small)

    actual.backward()
    gradients = export_gradients(model)
    assert gradients.keys() == weights.keys()
    # A gradient that vanishes (those of W_q and W_k with one token) is compared on the scale of the others.
    largest = max(x.grad.abs().max().item() for x in weights.values())  # type: ignore[union-attr]
    # So are those of a key's bias, which shifts all scores of a query alike, where positions are not rotary.
    floors = {key: largest if key.endswith((".bk", "norm_k.bias")) else 1e-4 * largest for key in weights}
    errors = {key: error(gradients[key], x.grad, floors[key]) for key, x in weights.items()}  # type: ignore[arg-type]
    assert max(errors.values()) < large, {key: f"{e:.1e}" for key, e in errors.items() if e >= large}
