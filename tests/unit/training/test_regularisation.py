"""Dropout, label smoothing and the z-loss in a training step."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import NextToken, RowFormat
from ngpt_train.evaluation.validation import Validation
from ngpt_train.kernels.dropout import row_seeds
from ngpt_train.models import export_gradients, load_weights
from ngpt_train.training import build_state, train_step
from ngpt_train.training.step import dropout_seeds
from tests.properties.architectures import ARCHITECTURES, SMALL, shapes
from tests.properties.runs import micro_batches, run_config
from tests.reference.attention import loss_sum
from tests.reference.training import Recipe

ROWS, T, C, E = 4, 16, 0.03, 0.2
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1e9, warmup_steps=0)
NAMES = ["gpt", "ngpt", "normformer", "gpt_encoder_decoder", "ntransformer"]
DROPOUT = [f"model.{place}_dropout=0.2" for place in ("embedding", "residual", "attention")]
Z = f"optim.z_loss={C}"


def config(name: str, *options: str, micro_rows: int = ROWS // 2, recipe: Recipe = RECIPE) -> Config:
    return run_config(
        name, SMALL, recipe, rows=ROWS, context=T, micro_rows=micro_rows, parallel="single", options=options
    )


def batches(name: str, n: int = 2) -> list[tuple[Tensor, ...]]:
    return micro_batches(name, SMALL, ROWS, T, 0, n)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("smoothing", [0.0, E])
def test_a_step_is_that_of_the_formula(name: str, smoothing: float) -> None:
    """Every gradient in fp64. Caught: an architecture that z-loss or smoothing does not reach, a term that is divided
    by another number than the loss, counts where targets do not, or is reported as part of the cross-entropy."""
    architecture = ARCHITECTURES[name]
    state = build_state(config(name, f"optim.label_smoothing={smoothing}", Z))
    state.model.double()
    weights = architecture.random_weights(shapes(architecture, SMALL), 0)
    load_weights(state.model, weights)
    seen: dict[str, Tensor] = {}
    state.optimizer.register_step_pre_hook(lambda *_: seen.update(export_gradients(state.model)))
    result = train_step(state, batches(name))

    tokens, targets, *doc_ids = (torch.cat(parts) for parts in zip(*batches(name), strict=True))
    for x in weights.values():
        x.requires_grad_()
    logits = architecture.logits(weights, tokens, SMALL, *doc_ids)  # of an encoder-decoder those of its decoder
    targets = targets[:, -logits.shape[1] :]
    counts = targets != -100
    cross_entropy = loss_sum(logits, targets) / counts.sum()
    lse = logits.exp().sum(-1).log()
    of_all_tokens = (lse - logits.sum(-1) / SMALL.vocab_size)[counts].mean()  # mean over the vocabulary of -log p
    z_loss = C * (lse[counts] ** 2).mean()
    ((1 - smoothing) * cross_entropy + smoothing * of_all_tokens + z_loss).backward()
    assert result.loss.item() == pytest.approx(cross_entropy.item(), rel=1e-12)
    assert result.z_loss is not None
    assert result.z_loss.item() == pytest.approx(z_loss.item(), rel=1e-12)
    norm = math.sqrt(sum(x.grad.square().sum().item() for x in weights.values()))  # type: ignore[union-attr]
    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-11)
    for key, x in weights.items():
        assert x.grad is not None
        torch.testing.assert_close(seen[key], x.grad, rtol=1e-9, atol=1e-12 * norm, msg=key)


@pytest.mark.parametrize("name", ["gpt", "ngpt", "gpt_encoder_decoder"])
def test_what_is_reported_is_the_same_without_z_loss(name: str) -> None:
    """Bit for bit, in training and validation. Caught: a curve that no other run's can be compared with; training after
    a validation that has lost the z-loss."""
    plain, with_z = (build_state(config(name, *options)) for options in ((), (Z,)))
    ids = np.random.default_rng(0).integers(0, SMALL.vocab_size, 8 * T).astype(np.uint16)
    rows = NextToken(Tokens("validation", Path("tokens"), [ids], eos=0), RowFormat(T, eos=0))
    validation = Validation(rows, np.full(SMALL.vocab_size, 2), np.arange(8))
    losses = [validation.row_losses(state.model, state.world) for state in (with_z, plain)]
    assert losses[0].metrics() == losses[1].metrics()
    one, other = (train_step(state, batches(name)) for state in (plain, with_z))
    assert one.z_loss is None
    assert other.z_loss is not None
    assert other.z_loss > 0
    assert torch.equal(one.loss, other.loss)
    assert not torch.equal(one.grad_norm, other.grad_norm)


@pytest.mark.parametrize("name", [*NAMES, "powernorm"])
def test_micro_batches_do_not_change_dropout(name: str) -> None:
    """One micro batch and four give the same loss and gradient in fp64, and every step drops other values. Caught: rows
    that are counted anew in each micro batch; masks of every step alike."""
    options = [*DROPOUT, "model.norm=layer"] if name == "powernorm" else DROPOUT
    results = []
    for n in (1, ROWS):
        state = build_state(config(name, *options, micro_rows=ROWS // n, recipe=replace(RECIPE, lr=1e-30)))
        state.model.double()
        results.append([train_step(state, batches(name, n)) for _ in range(2)])
    (whole, later), (parts, parts_later) = results
    for one, other in ((whole, parts), (later, parts_later)):
        assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-12)
        assert other.grad_norm.item() == pytest.approx(one.grad_norm.item(), rel=1e-10)
    assert abs(later.loss - whole.loss) > 1e-4  # the weights have not moved


def test_row_numbers_do_not_depend_on_ranks() -> None:
    """Of a step whose ranks have consecutive rows, and of one whose rows are dealt in turn, as by the loader. Caught: a
    rank that enters the seed, ranks whose rows drop alike."""
    given = config("gpt", *DROPOUT)
    whole = row_seeds(given.run.seed, 7, torch.arange(12))
    for size, micro in ((1, [12]), (2, [2, 4]), (3, [1, 1, 2]), (4, [3])):
        for rank in range(size):
            world = SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"))
            state: Any = SimpleNamespace(config=given, step=7, world=world)
            dealt = torch.arange(rank, 12, size)
            for rows, expected in ((None, whole.chunk(size)[rank]), (dealt, whole[rank::size])):
                found = [part["seeds"] for part in dropout_seeds(state, micro, rows)]
                assert [len(part) for part in found] == micro
                assert torch.equal(torch.cat(found), expected)
    assert len(whole.unique()) == 12


def test_without_dropout_the_model_gets_nothing() -> None:
    """Caught: an argument that costs graphs and time where the option is off."""
    state = build_state(config("gpt"))
    assert dropout_seeds(state, [2, 2]) == [{}, {}]
    state.model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    state.model.layers[0].register_forward_pre_hook(lambda _, args, kwargs: calls.append(len(args)), with_kwargs=True)
    calls: list[Any] = []
    train_step(state, batches("gpt"))
    assert calls == [{}, 3] * 2


@pytest.mark.parametrize(
    "setting",
    [
        *("model.residual_dropout=1", "model.embedding_dropout=1", "model.attention_dropout=-0.1"),
        *("optim.label_smoothing=1", "optim.z_loss=-1e-4", "optim.z_loss=1e4", "optim.z_loss=nan", "optim.z_loss=true"),
    ],
)
def test_values_that_are_refused(setting: str) -> None:
    """Caught: rows that are dropped whole, a term that drives logits apart or makes every gradient NaN."""
    with pytest.raises(ConfigError, match=rf"{setting}: must be a number >= 0"):
        config("gpt", setting)


@pytest.mark.parametrize("kernel", ["flash_attn", "flex"])
def test_kernels_whose_dropout_is_another(kernel: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention_dropout=0\.1.*kernels\.attention"):
        config("gpt", "model.attention_dropout=0.1", f"kernels.attention={kernel}")
