"""Thirty steps through the step contract against a plain loop in fp64.

Caught: no projection after the step, no clipping or always to 1, warmup t / W, a cosine that counts the warmup or is
one step off, other betas or eps, decay left out, a loss divided per micro batch; nuGPT's rates at the wrong matrices.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from ngpt_train.models import export_weights, load_weights
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import ARCHITECTURES, Size, ngpt_with, shapes
from tests.properties.runs import run_config, text_like_rows
from tests.reference import angpt, ngpt, training_ngpt
from tests.reference.matrix_steps import MatrixSteps
from tests.reference.training import Batch, Recipe, learning_rate, nugpt_rates, train

SIZE = Size(d_model=32, n_layers=2, n_heads=4, vocab_size=97, n_kv_heads=4, d_mlp=128)
STEPS, ROWS, T = 30, 8, 24
RECIPES = {
    "angpt": Recipe(STEPS, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0),
    "gpt": Recipe(STEPS, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=2.0, warmup_steps=4),
    "ngpt": Recipe(STEPS, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0),
}


PROJECTIONS = {"angpt": angpt.project, "ngpt": ngpt.project}


def assert_near(final: dict[str, Tensor], weights: dict[str, Tensor], most: float) -> None:
    """Each tensor relative to its norm."""
    errors = {key: ((final[key].double() - x).norm() / x.norm()).item() for key, x in weights.items()}
    assert max(errors.values()) < most, errors


def reference_run(
    name: str, weights: dict[str, Tensor], batches: list[list[Batch]], *, projected: bool
) -> list[tuple[float, float]]:
    """Train fp64 `weights` in place; loss and gradient norm of each step."""
    forward = partial(ARCHITECTURES[name].forward, n_heads=SIZE.n_heads)
    return train(forward, PROJECTIONS[name] if projected else lambda _: None, weights, batches, RECIPES[name])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("accumulation", "dtype"), [(1, torch.float32), (2, torch.float64)])
@pytest.mark.parametrize("name", RECIPES)
def test_thirty_steps(name: str, accumulation: int, dtype: torch.dtype) -> None:
    """In fp64 only the factor that clips is rounded to fp32, so that every other difference is seen."""
    recipe = RECIPES[name]
    # Of loss, gradient norm and weights, in roundings of fp32. Adam divides a gradient by its own size, its roundings
    # too, and each step starts from the last one's: with each operation moved by one (tests/rounding.py) up to 80, 210
    # and 1060 were seen in fp32, and less than one in fp64.
    roundings = (512, 1024, 4096) if dtype == torch.float32 else (8, 8, 8)
    of_loss, of_norm, of_weights = (n * torch.finfo(torch.float32).eps for n in roundings)
    state = build_state(run_config(name, SIZE, recipe, rows=ROWS, context=T, micro_rows=ROWS // accumulation))
    state.model.to(dtype)
    weights = ARCHITECTURES[name].random_weights(shapes(ARCHITECTURES[name], SIZE), 0)
    weights = {key: x.to(dtype).double() for key, x in weights.items()}
    load_weights(state.model, {key: x.to(dtype) for key, x in weights.items()})
    rows = [text_like_rows(ROWS, T, SIZE.vocab_size, seed=step) for step in range(STEPS)]
    batches = [
        list(zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True)) for tokens, targets in rows
    ]
    results = [train_step(state, micro_batches) for micro_batches in batches]
    unprojected = {key: x.clone() for key, x in weights.items()}
    expected = reference_run(name, weights, batches, projected=name in PROJECTIONS)

    for step, (result, (loss, norm)) in enumerate(zip(results, expected, strict=True)):
        assert result.loss.item() == pytest.approx(loss, rel=of_loss), f"loss of step {step}"
        assert result.grad_norm.item() == pytest.approx(norm, rel=of_norm), f"gradient norm of step {step}"
        assert int(result.n_tokens) == sum(int((targets != -100).sum()) for _, targets in batches[step])
        assert not result.skipped
    final = export_weights(state.model)
    assert_near(final, weights, of_weights)

    losses, norms = [loss for loss, _ in expected], [norm for _, norm in expected]
    assert losses[-1] < 0.95 * losses[0]
    assert min(norms) < recipe.clip_norm < max(norms)
    if name in PROJECTIONS:
        for key, x in final.items():
            if x.ndim == 2:
                assert x.norm(dim=-1).max() < 1 + 1e-6, key
                assert name == "angpt" or x.norm(dim=-1).min() > 1 - 1e-6, key
        free = [loss for loss, _ in reference_run(name, unprojected, batches, projected=False)]
        assert max(abs(a / b - 1) for a, b in zip(free, losses, strict=True)) > 1e-3, "the projection would not show"


def test_thirty_steps_of_nugpt() -> None:
    """The recipe as a user chooses it, at 4 times the reference's width, half its depth, and a fifth of its steps."""
    recipe = Recipe(STEPS, 1e-2, 0.9, 0.95, 1e-16, weight_decay=0.0, clip_norm=1e9, warmup_steps=0, final_share=0.1)
    reference = ["model.reference.d_model=8", "model.reference.n_layers=4", f"model.reference.steps={5 * STEPS}"]
    options = ["recipe=nugpt", *reference]
    state = build_state(run_config("ngpt", SIZE, recipe, rows=ROWS, context=T, micro_rows=ROWS, options=options))
    assert state.config.optim.eps == recipe.eps
    state.model.to(torch.float64)
    alpha = ("vector", 0.05 * 4 / 2, 0.03)
    one = ("vector", 1.0, 0.03)
    by_hand = ngpt_with({"alpha_attn": alpha, "alpha_mlp": alpha, "s_qk": one, "s_z": ("vector", 2.0, 0.03)})
    start = export_weights(state.model)
    weights = by_hand.random_weights(shapes(by_hand, SIZE), 0)
    for key, x in weights.items():
        if x.ndim < 2:  # as the model has begun
            x.fill_(1.0 if key.endswith(("s_u", "s_v")) else 0.03)
            torch.testing.assert_close(start[key].double(), x, rtol=1e-6, atol=0)
    load_weights(state.model, weights)
    rows = [text_like_rows(ROWS, T, SIZE.vocab_size, seed=step) for step in range(STEPS)]
    results = [train_step(state, [batch]) for batch in rows]

    forward = partial(by_hand.forward, n_heads=SIZE.n_heads)
    rates = nugpt_rates(list(weights), m=4.0, horizon=1 / 5)
    assert len(set(rates.values())) == 4
    expected = train(forward, ngpt.project, weights, [[batch] for batch in rows], recipe, rates)
    assert [result.loss.item() for result in results] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    base_rates = [learning_rate(recipe, step) for step in range(STEPS)]
    assert [result.lr for result in results] == pytest.approx(base_rates)  # whatever the kinds of parameters have
    assert_near(export_weights(state.model), weights, 1e-6)
    assert expected[-1][0] < 0.95 * expected[0][0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("gpt", MatrixSteps("muon", weight_decay=0.1)),
        ("gpt", MatrixSteps("muon", momentum=0.8, nesterov=False, adjust_lr="match_rms_adamw")),
        ("gpt", MatrixSteps("normuon", weight_decay=0.1)),
        ("gpt", MatrixSteps("adamh")),
        ("gpt", MatrixSteps("muonh")),
        ("ngpt", MatrixSteps("muon")),
        ("ngpt", MatrixSteps("normuon")),
        ("ngpt", MatrixSteps("adamh")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_twenty_four_steps_of_matrix_optimizers(name: str, steps: MatrixSteps) -> None:
    """With grouped keys, and rates of their own for the tables and vectors. Caught: a step on W_q, W_k and W_v as one
    matrix, W_o's out for its in, the embedding among the matrices, a decay at the adjusted rate, the projection left
    out, a rate that misses its group."""
    size = Size(d_model=32, n_layers=2, n_heads=4, vocab_size=97, n_kv_heads=2, d_mlp=80)
    n_steps, warmup = 24, 0 if name == "ngpt" else 4
    recipe = Recipe(n_steps, 2e-2, 0.9, 0.95, 1e-8, steps.weight_decay, clip_norm=1.0, warmup_steps=warmup)
    options = [f"optim.name={steps.name}", "optim.groups.embedding=1e-2", "optim.groups.vector=4e-3"]
    if steps.name != "adamh":
        options += [f"optim.momentum={steps.momentum}", f"optim.nesterov={steps.nesterov}".lower()]
        options += [] if steps.name == "muonh" else [f"optim.adjust_lr={steps.adjust_lr}"]
    state = build_state(run_config(name, size, recipe, rows=ROWS, context=T, micro_rows=ROWS, options=options))
    state.model.to(torch.float64)
    state.optimizer.dtype = torch.float64  # type: ignore[attr-defined]  # of Newton-Schulz
    weights = ARCHITECTURES[name].random_weights(shapes(ARCHITECTURES[name], size), 0)
    load_weights(state.model, weights)
    rows = [text_like_rows(ROWS, T, size.vocab_size, seed=step) for step in range(n_steps)]
    results = [train_step(state, [batch]) for batch in rows]

    forward = partial(ARCHITECTURES[name].forward, n_heads=size.n_heads)
    rates = {key: 0.5 if key == "embedding" else 0.2 for key, x in weights.items() if key == "embedding" or x.ndim < 2}
    projected = ngpt.project if name == "ngpt" else lambda _: None
    expected = train(forward, projected, weights, [[batch] for batch in rows], recipe, rates, steps.move)
    # Newton-Schulz multiplies what is left of a vanishing singular value by up to 485.
    assert [result.loss.item() for result in results] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert_near(export_weights(state.model), weights, 1e-5)
    assert expected[-1][0] < 0.95 * expected[0][0]


def test_fifty_steps_of_training_ngpt() -> None:
    """All four parts at once, where each acts. Caught: parts in another order, a gradient that reaches s_z
    preconditioned, a cap of embeddings."""
    steps = 50
    recipe = Recipe(steps, 2e-2, 0.9, 0.95, 1e-16, weight_decay=0.0, clip_norm=1e9, warmup_steps=5)
    parts = training_ngpt.Parts(q=0.5, rho=0.2, gate_power=0.5, gate_eps=1e-4, angle_cap=0.02)
    chosen = {
        "model.logit_preconditioning": parts.q,
        "schedule.rho": parts.rho,
        "optim.gate_power": parts.gate_power,
        "optim.gate_eps": parts.gate_eps,
        "optim.angle_cap": parts.angle_cap,
        "model.s_z.init": 2.0,
        "model.s_z.scale": 0.5,
    }
    options = ["recipe=training_ngpt", *(f"{name}={value}" for name, value in chosen.items())]
    state = build_state(run_config("ngpt", SIZE, recipe, rows=ROWS, context=T, micro_rows=ROWS, options=options))
    state.model.to(torch.float64)
    by_hand = ngpt_with({"s_z": ("vector", 2.0, 0.5)})
    weights = by_hand.random_weights(shapes(by_hand, SIZE), 0)
    weights["s_z"] = weights["s_z"].abs()  # of others the formula has no power
    load_weights(state.model, weights)
    batches = [text_like_rows(ROWS, T, SIZE.vocab_size, seed=step) for step in range(steps)]
    results = [train_step(state, [batch]) for batch in batches]

    forward = partial(by_hand.forward, n_heads=SIZE.n_heads)
    rates = [training_ngpt.log_rate(recipe.lr, t, 5, steps, parts.rho) for t in range(steps)]
    losses, n_capped, n_rows = training_ngpt.train(forward, weights, batches, parts, rates, factor=4.0)
    assert 0.05 < n_capped / n_rows < 0.95
    assert [result.lr for result in results] == pytest.approx(rates)
    assert [result.loss.item() for result in results] == pytest.approx(losses, rel=1e-8)
    assert_near(export_weights(state.model), weights, 1e-6)
    assert losses[-1] < 0.95 * losses[0]
