"""The four parts of "Training nGPT" (arXiv 2608.01284, second-hand), each by its identities, in fp64."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from ngpt_train.config import load_config
from ngpt_train.config.sections.optim import ScheduleConfig
from ngpt_train.models import build_model
from ngpt_train.models.ngpt.model import preconditioned
from ngpt_train.optim.angle_cap import cap_
from ngpt_train.optim.gated_adam import GatedAdam, gate
from ngpt_train.optim.schedule import lr_at
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

ROWS, T = 4, 16
RECIPE = Recipe(6, 5e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(gradients: Iterable[Tensor], optimizer: type[torch.optim.Optimizer], **options: object) -> Tensor:
    """Weights that start at 1 to 2, after a step with each of the gradients."""
    w = torch.nn.Parameter(1 + normal(7, 5).abs())
    chosen = optimizer([{"params": [w]}], lr=0.1, betas=(0.8, 0.9), **options)  # type: ignore[call-arg]
    for g in gradients:
        w.grad = g.clone()
        chosen.step()
    return w.detach()


GRADIENTS = [1e-3 * normal(7, 5, seed=step) for step in range(1, 9)]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_gate_of_power_1_is_adam_with_the_sum_of_both_eps(decay: float) -> None:
    """Caught: a gate on the moments, a decay that is gated, a bias correction left out."""
    ours = moved(
        GRADIENTS, GatedAdam, power=1.0, gate_eps=2e-4, eps=3e-4, weight_decay=decay, decoupled_weight_decay=True
    )
    theirs = moved(GRADIENTS, torch.optim.AdamW, eps=5e-4, weight_decay=decay)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)


def test_the_gate() -> None:
    d = torch.logspace(-9, 3, 200, dtype=torch.float64)
    for power in (0.25, 0.5, 1.0, 2.0):
        gamma = gate(d, power, 1e-4)
        torch.testing.assert_close(gamma, d**power / (d**power + 1e-4**power), rtol=1e-12, atol=0)
        assert (gamma.diff() > 0).all()
        assert gate(torch.tensor(1e-4), power, 1e-4).item() == pytest.approx(0.5)
    torch.testing.assert_close(gate(d, 0.5, 1e-300), torch.ones_like(d), rtol=0, atol=1e-14)  # Adam
    torch.testing.assert_close(gate(d, 0.0, 1e-4), torch.full_like(d, 0.5))  # why a power of 0 is refused


def test_a_scaled_gradient_is_a_smaller_gate_eps() -> None:
    """Without eps. Caught: a gate that sees the gradient and not its second moment."""
    scaled = moved([32 * g for g in GRADIENTS], GatedAdam, power=0.5, gate_eps=1e-3, eps=0.0)
    torch.testing.assert_close(
        scaled, moved(GRADIENTS, GatedAdam, power=0.5, gate_eps=1e-3 / 32, eps=0.0), rtol=1e-13, atol=0
    )
    assert (scaled - moved(GRADIENTS, GatedAdam, power=0.5, gate_eps=1e-3, eps=0.0)).abs().max() > 1e-3


def test_the_gated_step_divides_by_grad_scale_and_skips() -> None:
    """Caught: a skipped step that decays, counts, or spoils the moments with a NaN."""
    w = torch.nn.Parameter(normal(7, 5))
    optimizer = GatedAdam([{"params": [w]}], 0.5, 1e-4, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    w.grad = 4 * GRADIENTS[0]
    optimizer.step()
    held = [x.clone() for x in (w.detach(), *optimizer.state[w].values())]
    torch.testing.assert_close(optimizer.state[w]["exp_avg"], 0.1 * GRADIENTS[0], rtol=1e-12, atol=0)
    w.grad = torch.full_like(w, torch.nan)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(map(torch.equal, held, (w.detach(), *optimizer.state[w].values())))


@pytest.mark.parametrize("theta", [0.01, 0.3, 2.0])
def test_the_cap_is_never_exceeded(theta: float) -> None:
    """Angles up to 180 degrees. Caught: phi by asin, which has no angle above 90 degrees; a row beside its sphere; a
    cap of the chord; a row within the cap that changes."""
    before = torch.nn.functional.normalize(normal(400, 16), dim=1)
    tangent = torch.nn.functional.normalize(normal(400, 16, seed=1), dim=1)
    tangent = torch.nn.functional.normalize(tangent - (tangent * before).sum(1, keepdim=True) * before, dim=1)
    phi = torch.linspace(0, math.pi - 1e-3, 400, dtype=torch.float64)[:, None]
    candidate = phi.cos() * before + phi.sin() * tangent
    capped = candidate.clone()
    cap_(capped, before, theta)
    least = phi.clamp(max=theta)
    torch.testing.assert_close(capped, least.cos() * before + least.sin() * tangent, rtol=0, atol=1e-12)
    assert torch.equal(capped[phi[:, 0] < theta], candidate[phi[:, 0] < theta])
    # The same before the projection: only the candidate's direction counts.
    long = candidate * (0.2 + 5 * phi)
    cap_(long, before, theta)
    torch.testing.assert_close(torch.nn.functional.normalize(long, dim=1), capped, rtol=0, atol=1e-12)


def turned(cap: float | None) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights of a run of large steps; and the largest angle of a row of each matrix in a step."""
    given = [f"optim.angle_cap={'null' if cap is None else cap}"]
    state = build_state(run_config("ngpt", SMALL, RECIPE, rows=ROWS, context=T, micro_rows=ROWS, options=given))
    largest: dict[str, float] = {}
    for step in range(RECIPE.steps):
        old = {name: x.detach().double() for name, x in state.model.named_parameters() if x.ndim == 2}
        train_step(state, [text_like_rows(ROWS, T, SMALL.vocab_size, seed=step)])
        for name, x in state.model.named_parameters():
            if name in old:
                assert (x.detach().norm(dim=1) - 1).abs().max() < 1e-6
                angles = 2 * ((x.detach().double() - old[name]).norm(dim=1) / 2).asin()
                largest[name] = max(largest.get(name, 0.0), angles.max().item())
    return {name: x.detach() for name, x in state.model.named_parameters()}, largest


def test_the_cap_in_a_run() -> None:
    """Caught: embeddings that are capped, a matrix that is not, a cap that changes steps below it."""
    _, angles = turned(0.05)
    hidden = {name: angle for name, angle in angles.items() if name not in ("embedding", "output")}
    assert len(hidden) == len(angles) - 2 == 4 * SMALL.n_layers
    assert all(0.0499 < angle < 0.05001 for angle in hidden.values()), hidden
    assert min(angles["embedding"], angles["output"]) > 0.1
    free, _ = turned(None)
    assert all(torch.equal(x, free[name]) for name, x in turned(3.1)[0].items())


def test_the_log_schedule() -> None:
    """Ends, first slope and area, with a floor. Caught: a progress that counts the warmup, log10 on one side."""
    for rho, area in ((1.0, 0.443), (0.3, 0.382), (0.1, 0.317), (0.03, 0.253), (0.01, 0.207)):
        schedule = ScheduleConfig(kind="log", warmup_steps=1000, rho=rho, final_lr=0.1)
        steps = 101_000
        rates = [lr_at(step, schedule, 0.9, steps) for step in range(1000, steps + 1)]
        assert rates[0] == pytest.approx(0.9, rel=1e-12)
        assert rates[-1] == pytest.approx(0.1, rel=1e-12)
        assert all(rate > later for rate, later in itertools.pairwise(rates))
        share = (sum(rates) / len(rates) - 0.1) / 0.8
        assert share == pytest.approx(1 / math.log(1 + 1 / rho) - rho, abs=1e-4)
        assert share == pytest.approx(area, abs=1e-3)
        slope = (rates[1] - rates[0]) * 100_000 / 0.8
        assert slope == pytest.approx(-1 / (rho * math.log(1 + 1 / rho)), rel=1e-3)
    assert lr_at(499, ScheduleConfig(kind="log", warmup_steps=1000), 0.9, 101_000) == pytest.approx(0.45)
    assert ScheduleConfig(kind="log").auto_warmup(50_000) == 5000  # 10 %, however long


def test_the_preconditioner() -> None:
    s_z = torch.tensor([1.0, 2.0, 3.0, -2.0], dtype=torch.float64)  # mean 1
    assert preconditioned(s_z, 1.0).tolist() == [1.0, 2.0, 3.0, -2.0]
    assert preconditioned(s_z, 0.0).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert preconditioned(s_z, 2.0).tolist() == [1.0, 4.0, 9.0, -4.0]
    assert torch.equal(preconditioned(7 * s_z, 0.5), preconditioned(s_z, 0.5))


@pytest.mark.parametrize("model", ["ngpt", "ntransformer"])
def test_the_recipe(model: str) -> None:
    config = load_config([f"model={model}", "recipe=training_ngpt", "train.steps=30000", "optim.lr=1e-2"])
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("log", 3000)
    optim = config.optim
    assert (optim.gate_power, optim.weight_decay, config.model.logit_preconditioning) == (0.5, 0, 1)  # type: ignore[attr-defined]
    config.model.vocab_size = 32
    head = build_model(config.model).head(torch.zeros(1, 1, config.model.d_model))
    assert head.gradient_scale is not None
    off = dataclasses.replace(config.model, logit_preconditioning=None)  # type: ignore[call-arg]
    assert build_model(off).head(torch.zeros(1, 1, config.model.d_model)).gradient_scale is None
