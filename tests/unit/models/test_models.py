"""Logits, loss and every gradient against the equations, with all weights away from their init.

Caught, among others: 1 / sqrt(d_k) for sqrt(d_k), s_qk once instead of squared, the missing |alpha|, the suggestion not
normalised, SiLU on u instead of v, QK-norm after RoPE, a norm's eps outside the root, HeadScale after W_o instead of
before it, lambda on the branch instead of the residual, rotated cross-attention, a memory mask left out.
"""

from dataclasses import replace

import pytest
import torch

from ngpt_train.models import export_gradients
from tests.properties.architectures import (
    ARCHITECTURES,
    SMALL,
    VARIANTS,
    Architecture,
    Size,
    documents,
    error,
    jittered,
    random_batch,
    source_length,
)
from tests.reference.attention import loss_sum

CASES = {  # size, rows, tokens that logits are for
    "usual": (SMALL, 3, 9),
    "one head, odd vocabulary": (Size(10, 1, 1, 7, 1, 40), 2, 13),
    "grouped queries": (Size(24, 2, 4, 31, 2, 50, n_encoder_layers=1, source_context=5), 2, 11),
    "one key head": (Size(24, 3, 6, 31, 1, 17, n_encoder_layers=2, source_context=3), 2, 5),
    "one token": (replace(SMALL, source_context=1), 4, 1),
    "longer": (Size(16, 2, 2, 97, 2, 64, n_encoder_layers=2, source_context=33), 1, 65),
}
# fp32 differs by its roundings: where most is added up, and where one row of keys is.
IN_DTYPES = [*((case, torch.float64) for case in CASES), ("longer", torch.float32), ("one token", torch.float32)]
# Queries and keys, and the norm in front of cross-attention's queries.
THROUGH_SCORES = (".wq", ".wk", ".bq", ".bk", ".s_qk", ".q_norm", ".k_norm", ".norm_cross")


@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize(("case", "dtype"), IN_DTYPES, ids=lambda x: str(x).replace("torch.float", "fp"))
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "powernorm"])
def test_logits_loss_and_gradients(name: str, case: str, dtype: torch.dtype, packed: bool) -> None:
    check(ARCHITECTURES[name], case, dtype, packed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["usual", "grouped queries"])
@pytest.mark.parametrize("name", VARIANTS)
def test_options(name: str, case: str) -> None:
    check(VARIANTS[name], case, torch.float64, packed=case == "usual")


def check(architecture: Architecture, case: str, dtype: torch.dtype, packed: bool) -> None:
    size, rows, t = CASES[case]
    model, weights = jittered(architecture, size, dtype)
    tokens, targets = random_batch(architecture, size, rows, t)
    doc_ids = None
    if packed:
        targets, doc_ids = documents(architecture, size, targets)
    # In roundings. They add up along the blocks; with each operation moved by one (tests/rounding.py) 8 were seen of
    # logits and 60 of gradients, of a model of two stacks up to 350.
    eps = torch.finfo(dtype).eps * (4 if architecture.has_encoder else 1)
    small, large = 32 * eps, 256 * eps

    for x in weights.values():
        x.requires_grad_()
    logits = architecture.logits(weights, tokens, size, doc_ids)
    loss = loss_sum(logits, targets[:, source_length(architecture, size) :])
    loss.backward()

    actual_logits = model(tokens, doc_ids=doc_ids)
    assert actual_logits.shape == (rows, t, size.vocab_size)
    assert actual_logits.dtype == dtype
    assert error(actual_logits.detach(), logits.detach()) < small
    actual, n_tokens = model.loss(tokens, targets, doc_ids)
    assert int(n_tokens) == int((targets != -100).sum())
    assert actual.item() == pytest.approx(loss.item(), rel=small)

    actual.backward()
    gradients = export_gradients(model)
    assert gradients.keys() == weights.keys()
    # A gradient that vanishes is what rounding leaves of terms that cancel, so the others are its scale: that of a
    # key's bias, which shifts all scores of a query alike, where positions are not rotary; s_u as one number, which
    # changes a length that is normalised away; with one key, all that acts through scores alone. What is left of one
    # that is merely small has their rounding as well: none is compared more closely than to a hundredth of the largest,
    # and of a vector that is one number, the sum of a whole layer's, to a tenth.
    largest = max(x.grad.abs().max().item() for x in weights.values())  # type: ignore[union-attr]
    scalar_s_u = {key for key, x in weights.items() if key.endswith("s_u") and x.numel() == 1}
    vanishes = {key for key in weights if key.endswith((".bk", "norm_k.bias"))} | scalar_s_u
    if case == "one token":
        vanishes |= {key for key in weights if key.endswith(THROUGH_SCORES)}
        assert all(weights[key].grad.abs().max() < 1e-12 * largest for key in vanishes)  # type: ignore[union-attr]
    least = {key: 0.1 if x.numel() == 1 else 0.01 for key, x in weights.items()}
    floors = {key: largest if key in vanishes else least[key] * largest for key in weights}
    errors = {key: error(gradients[key], x.grad, floors[key]) for key, x in weights.items()}  # type: ignore[arg-type]
    assert max(errors.values()) < large, {key: f"{e:.1e}" for key, e in errors.items() if e >= large}
