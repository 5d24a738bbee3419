"""Muon, NorMuon and Hyperball: what their papers say of a step, and what they leave as it is."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ngpt_train.config import ConfigError, load_config
from ngpt_train.models import build_model, export_gradients, export_weights
from ngpt_train.optim.matrix_optimizer import AT_ONCE, MatrixOptimizer
from ngpt_train.optim.matrix_steps import adam_direction, ball_factors, one_length_per_neuron, orthogonalised
from ngpt_train.optim.optimizer import build_optimizer, lr_factors
from ngpt_train.training import TrainState, build_state, train_step
from tests.properties.architectures import SMALL
from tests.properties.runs import held, infinite_loss, micro_batches, run_config
from tests.reference.matrix_steps import newton_schulz
from tests.reference.training import Recipe

NAMES = ("muon", "normuon", "adamh", "muonh")
RECIPE = Recipe(200, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_singular_values(s: Tensor, n_columns: int) -> Tensor:
    u, _ = torch.linalg.qr(random(len(s), len(s)))
    v, _ = torch.linalg.qr(random(n_columns, len(s), seed=1))
    return u @ torch.diag(s) @ v.mT


def state_of(optimizer: str, model: str = "gpt", *options: str) -> TrainState:
    options = (f"optim.name={optimizer}", *options)
    return build_state(run_config(model, SMALL, RECIPE, rows=4, context=16, micro_rows=2, options=options))


@pytest.mark.parametrize("shape", [(6, 6), (6, 11), (6, 40), (40, 6)])
def test_newton_schulz_by_singular_values(shape: tuple[int, int]) -> None:
    """Caught: a coefficient, an iteration too few, the longer side; of long matrices the products by squares."""
    x = torch.stack([random(*shape), 1e6 * random(*shape, seed=1)])
    expected = torch.stack(list(map(newton_schulz, x)))
    torch.testing.assert_close(orthogonalised(x), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonalised(x.mT), expected.mT, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n_columns", "dtype"), [(64, torch.float32), (300, torch.float32), (300, torch.bfloat16)])
def test_singular_values_that_newton_schulz_leaves(n_columns: int, dtype: torch.dtype) -> None:
    """Of sigma / |x|_F from 0.003 on. Caught: products that lose the small ones, as squares do in bf16."""
    s = torch.logspace(0, -2.05, 64, dtype=torch.float64)
    x = with_singular_values(s / s.norm(), n_columns)
    assert (s / s.norm()).min() > 0.003
    found = torch.linalg.svdvals(orthogonalised(x.to(dtype)[None]).double())
    margin = 0.01 if dtype == torch.bfloat16 else 0.0
    assert 0.68 - margin < found.min()
    assert found.max() < 1.21 + margin


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_as_torch_muon(rule: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps of each matrix of the paper, whose optimizer is torch's; Newton-Schulz in bf16, as there, and of the
    matrices of all layers at once, as on GPUs."""
    monkeypatch.setitem(AT_ONCE, "cpu", 2**26)
    options = ["optim.name=muon", f"optim.adjust_lr={rule}", f"optim.nesterov={nesterov}".lower()]
    recipe = replace(RECIPE, weight_decay=0.1)
    config = run_config("gpt", SMALL, recipe, rows=4, context=16, micro_rows=2, options=options)
    model = build_model(config.model)
    model.compute_dtype = torch.bfloat16
    ours = build_optimizer(model, model.parameter_groups(), config.optim)
    start = {key: x for key, x in export_weights(model).items() if key.startswith("layers") and x.ndim == 2}
    upright = {key: (x.mT if key.endswith(("wo", "w_down")) else x).clone() for key, x in start.items()}
    weights = {key: torch.nn.Parameter(x.clone()) for key, x in upright.items()}
    theirs = torch.optim.Muon(weights.values(), lr=0.05, nesterov=nesterov, adjust_lr_fn=rule, weight_decay=0.1)
    for group in ours.param_groups:
        group["lr"] = 0.05
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for key, gradient in export_gradients(model).items():
            if key in weights:
                weights[key].grad = gradient.mT if key.endswith(("wo", "w_down")) else gradient
        ours.step()
        theirs.step()
    found = export_weights(model)
    for key, expected in weights.items():
        actual = found[key].mT if key.endswith(("wo", "w_down")) else found[key]
        moved = (expected - upright[key]).norm()
        assert (actual - expected).norm() < 2e-2 * moved, key  # bf16 has 8 bits


def test_normuon() -> None:
    """Caught: a bias correction, lengths of columns, another length of the whole; later steps without the first."""
    u, later = torch.stack([random(7, 12), 9 * random(7, 12, seed=2)]), random(2, 7, 12, seed=1)
    norms = torch.linalg.matrix_norm(u)
    first, mean_square = one_length_per_neuron(u, torch.zeros(2, 7, 1, dtype=torch.float64), 2)
    torch.testing.assert_close(first.norm(dim=2), (norms / math.sqrt(7))[:, None].expand(2, 7))
    second, _ = one_length_per_neuron(later, mean_square, 2)
    torch.testing.assert_close(torch.linalg.matrix_norm(second), torch.linalg.matrix_norm(later))
    assert second[0].norm(dim=1).std() > 1e-2
    transposed, _ = one_length_per_neuron(u.mT, torch.zeros(2, 1, 7, dtype=torch.float64), 1)
    torch.testing.assert_close(transposed, first.mT)


def test_a_step_of_hyperball() -> None:
    """Caught: a length of u that shows, a step of another length than eta R, a length of W that changes."""
    w, u, eta = random(5, 8), random(5, 8, seed=1), 0.1

    def moved(w: Tensor, u: Tensor) -> Tensor:
        keep, move = ball_factors(torch.stack([(w * w).sum(), (w * u).sum(), (u * u).sum()]), eta)
        assert ((move / keep) * u).norm().item() == pytest.approx(eta * w.norm().item(), rel=1e-12)
        return keep * w - move * u

    assert moved(w, u).norm().item() == pytest.approx(w.norm().item(), rel=1e-12)
    torch.testing.assert_close(moved(w, 1e-5 * u), moved(w, u))
    tangent = u - (w * u).sum() / (w * w).sum() * w
    cosine = torch.nn.functional.cosine_similarity(moved(w, tangent).flatten(), w.flatten(), dim=0)
    assert cosine.arccos().item() == pytest.approx(math.atan(eta), rel=1e-9)
    products = torch.stack([(w * w).sum(), torch.zeros(()), torch.zeros(())]).double()
    assert ball_factors(products, eta).tolist() == [1, 0], "no direction"


def test_adams_direction_at_the_first_step() -> None:
    g, t = random(3, 4), torch.ones(())
    u = adam_direction(0.1 * g, 0.05 * g.square(), t, 0.9, 0.95, 1e-12)
    torch.testing.assert_close(u, g.sign())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["adamh", "muonh"])
def test_hyperball_keeps_the_lengths_of_matrices_in_fp32(name: str) -> None:
    """Of each matrix by itself, to 1e-5 after 200 steps. Caught: fused matrices as one; an embedding that is held."""
    state = state_of(name)
    before = export_weights(state.model)
    for step in range(20):
        train_step(state, micro_batches("gpt", SMALL, 4, 16, seed=step % 5, n=1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(180):  # without passes, at the last rate
        for parameter in state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        state.optimizer.step()
    for key, x in export_weights(state.model).items():
        drift = abs(x.double().norm() / before[key].double().norm() - 1).item()
        assert (drift < 1e-5) == (x.ndim == 2 and key.startswith("layers")), key


@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_changes_no_bit(name: str) -> None:
    """Caught: NaN in a momentum or a neuron's mean square, a count of steps, a decay or a length that is set anew."""
    state = state_of(name)
    batch = micro_batches("gpt", SMALL, 4, 16, seed=0)
    train_step(state, batch)
    before = held(state)
    with infinite_loss(state):
        assert train_step(state, batch).skipped
    after = held(state)
    assert before.keys() == after.keys()
    for key, x in before.items():
        assert torch.equal(after[key], x), key
    train_step(state, batch)
    assert all(not torch.equal(x, before[key]) for key, x in held(state).items())


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_without_a_gradient_stays(name: str) -> None:
    """All zeros, as W_q's is while W_o is 0. Caught: 0 / 0."""
    state = state_of(name)
    assert isinstance(state.optimizer, MatrixOptimizer)
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = held(state)
    for group in state.optimizer.param_groups:
        group["lr"] = 0.1
    state.optimizer.step()
    for key, x in before.items():
        assert torch.equal(held(state)[key], x), key


def test_rates_of_groups() -> None:
    """Caught: learned positions among the hidden matrices, a rate that is a factor."""
    options = ["model=normformer", "model.positions=learned", "model.tied_embeddings=false", "optim.weight_decay=0"]
    rates = ["optim.lr=1e-2", "optim.groups.embedding=4e-2", "optim.groups.output=2e-3", "optim.groups.vector=3e-2"]
    config = load_config([*options, *rates, "optim.name=muonh", "model.vocab_size=50"])
    groups = build_model(config.model).parameter_groups(by_kind=True)
    found = {name: f for group, f in zip(groups, lr_factors(groups, config), strict=True) for name in group.names}
    expected = {"embedding": 4.0, "positions": 4.0, "output": 0.2}
    for name, factor in found.items():
        assert factor == pytest.approx(expected.get(name, 1.0 if name.endswith(".matrix") else 3.0)), name


def test_a_rate_of_parameters_that_are_not_there() -> None:
    """Caught: a tuned key without an effect."""
    options = ["model=composed", "model.norm=layer_plain", "model.vocab_size=50", "optim.groups.vector=3e-2"]
    config = load_config(options)
    with pytest.raises(ConfigError, match=r"vector=0\.03, model\.name=composed: no such .*\n  Leave .*vector out"):
        lr_factors(build_model(config.model).parameter_groups(by_kind=True), config)
    config = load_config([*options, "model.bias=true"])
    assert lr_factors(build_model(config.model).parameter_groups(by_kind=True), config)


def test_a_rate_of_another_optimizer_is_not_taken() -> None:
    """Caught: Adam's rate for Muon; an entry for Muon that Adam takes."""
    with pytest.raises(ConfigError, match=r"no learning rate for scale=8m and optim\.name=muon, only for"):
        load_config(["model=gpt", "scale=8m", "optim.name=muon"])
    config = load_config(["model=gpt", "scale=8m"])
    (entry,) = config.optim.lr_table["8m"][256]
    config.optim.lr_table["8m"][256].append(entry | {"optim": "muon", "lr": 0.5})
    assert config.optim.from_table(config)[0] == entry["lr"]
    config.optim.name = "muon"
    assert config.optim.from_table(config)[0] == 0.5
