"""Dropout and label smoothing in a training step."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.kernels.dropout import row_seeds
from ngpt_train.models import load_weights
from ngpt_train.training import build_state, train_step
from ngpt_train.training.step import dropout_seeds
from tests.properties.architectures import ARCHITECTURES, SMALL, export_gradients, shapes
from tests.properties.runs import padded_rows, run_config, text_like_rows
from tests.reference.attention import loss_sum
from tests.reference.training import Recipe

ROWS, T, C, E = 4, 16, 0.03, 0.2
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1e9, warmup_steps=0)
NAMES = ["gpt", "ngpt", "normformer", "gpt_encoder_decoder", "ntransformer"]
DROPOUT = [f"model.{place}_dropout=0.2" for place in ("embedding", "residual", "attention")]


def config(name: str, *options: str, micro_rows: int = ROWS // 2, recipe: Recipe = RECIPE) -> Config:
    return run_config(
        name, SMALL, recipe, rows=ROWS, context=T, micro_rows=micro_rows, parallel="single", options=options
    )


def micro_batches(name: str, micro_rows: int = ROWS // 2) -> list[tuple[Tensor, ...]]:
    """Rows that do not all count as many targets."""
    if ARCHITECTURES[name].has_encoder:
        batch: tuple[Tensor, ...] = padded_rows(ROWS, T, SMALL, seed=0)
    else:
        batch = text_like_rows(ROWS, T, SMALL.vocab_size, seed=0)
    return list(zip(*(part.split(micro_rows) for part in batch), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_smoothed_step_is_that_of_the_formula(name: str) -> None:
    """Every gradient in fp64, with the z-loss. Caught: an architecture that smoothing does not reach, one that counts
    where targets do not, a reported loss that is smoothed."""
    architecture = ARCHITECTURES[name]
    state = build_state(config(name, f"optim.label_smoothing={E}", f"optim.z_loss={C}"))
    state.model.double()
    weights = architecture.random_weights(shapes(architecture, SMALL), 0)
    load_weights(state.model, weights)
    seen: dict[str, Tensor] = {}
    state.optimizer.register_step_pre_hook(lambda *_: seen.update(export_gradients(state.model)))
    result = train_step(state, micro_batches(name))

    tokens, targets, *doc_ids = (torch.cat(parts) for parts in zip(*micro_batches(name), strict=True))
    for x in weights.values():
        x.requires_grad_()
    logits = architecture.logits(weights, tokens, SMALL, *doc_ids)
    targets = targets[:, -logits.shape[1] :]
    counts = targets != -100
    cross_entropy = loss_sum(logits, targets) / counts.sum()
    lse = logits.exp().sum(-1).log()
    of_all_tokens = (lse - logits.sum(-1) / SMALL.vocab_size)[counts].mean()  # mean over the vocabulary of -log p
    ((1 - E) * cross_entropy + E * of_all_tokens + C * (lse[counts] ** 2).mean()).backward()
    assert result.loss.item() == pytest.approx(cross_entropy.item(), rel=1e-12)
    norm = math.sqrt(sum(x.grad.square().sum().item() for x in weights.values()))  # type: ignore[union-attr]
    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-11)
    for key, x in weights.items():
        assert x.grad is not None
        torch.testing.assert_close(seen[key], x.grad, rtol=1e-9, atol=1e-12 * norm, msg=key)


@pytest.mark.parametrize("name", [*NAMES, "powernorm"])
def test_micro_batches_do_not_change_dropout(name: str) -> None:
    """One micro batch and four give the same loss and gradient in fp64, and every step drops other values. Caught: rows
    that are counted anew in each micro batch; masks of every step alike."""
    options = [*DROPOUT, "model.norm=layer"] if name == "powernorm" else DROPOUT
    results = []
    for micro_rows in (ROWS, 1):
        state = build_state(config(name, *options, micro_rows=micro_rows, recipe=replace(RECIPE, lr=1e-30)))
        state.model.double()
        results.append([train_step(state, micro_batches(name, micro_rows)) for _ in range(2)])
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
            state: Any = SimpleNamespace(
                config=given, step=7, world=SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"))
            )
            for rows, expected in (
                (None, whole.chunk(size)[rank]),
                (torch.arange(rank, 12, size), whole[rank::size]),
            ):
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
    train_step(state, micro_batches("gpt"))
    assert calls == [{}, 3] * 2


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.residual_dropout=1", r"must be a number >= 0 and < 1"),
        ("model.attention_dropout=-0.1", r"must be a number >= 0 and < 1"),
        ("optim.label_smoothing=1", r"must be a number >= 0 and < 1"),
        ("model.embedding_dropout=nan", r"must be a number >= 0 and < 1"),
    ],
)
def test_values_that_are_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config("gpt", setting)


@pytest.mark.parametrize("kernel", ["flash_attn", "flex"])
def test_kernels_whose_dropout_is_another(kernel: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention_dropout=0\.1.*kernels\.attention"):
        config("gpt", "model.attention_dropout=0.1", f"kernels.attention={kernel}")
