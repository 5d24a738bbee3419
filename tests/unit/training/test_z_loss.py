"""optim.z_loss: in the gradients of every architecture, and in no loss that is compared."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.data import Tokens
from ngpt_train.data.rows import NextToken, RowFormat
from ngpt_train.evaluation.validation import Validation
from ngpt_train.models import load_weights
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import ARCHITECTURES, SMALL, export_gradients, shapes
from tests.properties.runs import padded_rows, run_config, text_like_rows
from tests.reference.attention import loss_sum
from tests.reference.training import Recipe

ROWS, T, C = 4, 16, 0.03
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1e9, warmup_steps=0)
NAMES = ["gpt", "ngpt", "normformer", "gpt_encoder_decoder", "ntransformer"]


def config(name: str, *options: str) -> Config:
    """Two micro batches a step."""
    return run_config(
        name, SMALL, RECIPE, rows=ROWS, context=T, micro_rows=ROWS // 2, parallel="single", options=options
    )


def batch(name: str) -> tuple[Tensor, ...]:
    """Rows that do not all count as many targets."""
    if ARCHITECTURES[name].has_encoder:
        return padded_rows(ROWS, T, SMALL, seed=0)
    return text_like_rows(ROWS, T, SMALL.vocab_size, seed=0)


def micro_batches(name: str) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(ROWS // 2) for part in batch(name)), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_the_formula(name: str) -> None:
    """Every gradient in fp64. Caught: an architecture that the option does not reach, a term that is divided by another
    number than the loss, counts where targets do not, or is reported as part of the cross-entropy."""
    architecture = ARCHITECTURES[name]
    state = build_state(config(name, f"optim.z_loss={C}"))
    state.model.double()
    weights = architecture.random_weights(shapes(architecture, SMALL), 0)
    load_weights(state.model, weights)
    seen: dict[str, Tensor] = {}
    state.optimizer.register_step_pre_hook(lambda *_: seen.update(export_gradients(state.model)))
    result = train_step(state, micro_batches(name))

    tokens, targets, *doc_ids = batch(name)
    for x in weights.values():
        x.requires_grad_()
    logits = architecture.logits(weights, tokens, SMALL, *doc_ids)  # of an encoder-decoder those of its decoder
    targets = targets[:, -logits.shape[1] :]
    n_tokens = int((targets != -100).sum())
    cross_entropy = loss_sum(logits, targets) / n_tokens
    z_loss = C * (logits.exp().sum(-1).log() ** 2)[targets != -100].sum() / n_tokens
    (cross_entropy + z_loss).backward()
    assert result.loss.item() == pytest.approx(cross_entropy.item(), rel=1e-12)
    assert result.z_loss is not None
    assert result.z_loss.item() == pytest.approx(z_loss.item(), rel=1e-12)
    norm = math.sqrt(sum(x.grad.square().sum().item() for x in weights.values()))  # type: ignore[union-attr]
    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-11)
    for key, x in weights.items():
        assert x.grad is not None
        torch.testing.assert_close(seen[key], x.grad, rtol=1e-9, atol=1e-12 * norm, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_reported_is_the_same_without(name: str) -> None:
    """Bit for bit. Caught: a curve that no other run's can be compared with."""
    plain, with_z = (train_step(build_state(config(name, *options)), micro_batches(name)) for options in ((), (Z,)))
    assert plain.z_loss is None
    assert torch.equal(plain.loss, with_z.loss)
    assert not torch.equal(plain.grad_norm, with_z.grad_norm)


Z = f"optim.z_loss={C}"


@pytest.mark.parametrize("name", ["gpt", "ngpt"])
def test_validation_is_without_it(name: str) -> None:
    """Caught: bits per byte of runs with the option that are not those of runs without; training after a validation
    that has lost it."""
    ids = np.random.default_rng(0).integers(0, SMALL.vocab_size, 8 * T).astype(np.uint16)
    rows = NextToken(Tokens("validation", Path("tokens"), [ids], eos=0), RowFormat(T, eos=0))
    validation = Validation(rows, np.full(SMALL.vocab_size, 2), np.arange(8))
    plain, with_z = (build_state(config(name, *options)) for options in ((), (Z,)))
    losses = [validation.row_losses(state.model, state.world) for state in (with_z, plain)]
    assert losses[0].metrics() == losses[1].metrics()
    result = train_step(with_z, micro_batches(name))
    assert result.z_loss is not None
    assert result.z_loss > 0


@pytest.mark.parametrize("value", ["-1e-4", "inf", "nan", "true", "1e4"])
def test_values_that_it_does_not_take(value: str) -> None:
    """Caught: a term that drives logits apart, or makes every gradient NaN."""
    with pytest.raises(ConfigError, match=rf"optim\.z_loss={value}: must be a number >= 0.*\n.*\n.*optim\.z_loss=0"):
        config("gpt", f"optim.z_loss={value}")
