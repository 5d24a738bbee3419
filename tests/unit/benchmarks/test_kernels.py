"""`benchmarks.kernels` and the steps that it stands for: right first, then fast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import kernels, paper_steps
from benchmarks.common import WrongResultError
from benchmarks.paper_steps import Variant, build, make_config
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.check import cases
from ngpt_train.models import weights
from ngpt_train.training import build_state

OPERATIONS = ["sphere_step", "swiglu with scales", "swiglu", "rotary of nGPT", "rotary of GPT", "linear_cross_entropy"]
OPERATIONS += ["adam_rows_"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ON_CPU", kernels.Sizes(2, 8, 50, 2))


def test_every_kernel_is_checked_and_timed() -> None:
    """An operation is left out, an error is lost on its way, times are of something else than the pass they name."""
    entries = {entry.name: entry for entry in kernels.bench("64", "cpu")}
    for operation in OPERATIONS:
        alone = operation in ("linear_cross_entropy", "adam_rows_")
        for label in [""] if alone else [", forward", ", forward and backward"]:
            ours, eager = (entries[f"{operation}, d 64{label}: {who}"] for who in ("ours", "eager"))
            assert ours.relative_to == eager.name
            assert 0 < ours.more["error"] < 1e-5
            assert eager.ratio == 1


def test_a_wrong_kernel_is_never_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel whose one gradient is off by a per mille passes, or other operations are timed before it is refused."""
    right = cases.swiglu.swiglu

    def wrong(uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None) -> Tensor:
        y = right(uv, s_u, s_v)
        return y if s_u is None else y + 1e-3 * (s_u - s_u.detach())

    wrong.formula = right.formula
    monkeypatch.setattr(cases.swiglu, "swiglu", wrong)
    monkeypatch.setattr(kernels, "times", lambda *_: pytest.fail("timed"))
    with pytest.raises(WrongResultError, match=r"swiglu with scales, d 64 is wrong.*\n.*gradient 2"):
        next(kernels.bench("64", "cpu"))
    assert " ms" not in capsys.readouterr().out


def test_what_is_wrong_with_a_run() -> None:
    """Checks that see nothing: of losses, of the sphere."""
    ngpt = build("ngpt", "debug:32", "cpu")
    for losses, says in (([2.0, 1.0], None), ([1.0, 1.0], "did not fall"), ([1.0, float("nan")], "not finite")):
        ngpt.losses = [torch.tensor(loss) for loss in losses]
        if says is None:
            ngpt.check()
        else:
            with pytest.raises(WrongResultError, match=says):
                ngpt.check()
    ngpt.losses = [torch.tensor(2.0), torch.tensor(1.0)]
    with torch.no_grad():
        ngpt.state.model.embedding[3].mul_(1.01)
    with pytest.raises(WrongResultError, match="off the sphere"):
        ngpt.check()


def test_losses_by_kernels_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both losses are of one path."""
    gpt = Variant(build_state(make_config("gpt", "debug:32", "cpu")))
    gpt.losses = [torch.tensor(2.0), torch.tensor(1.0)]
    forward = type(gpt.state.model).forward

    def different(self: Any, *given: Any) -> Any:
        loss = forward(self, *given)
        return loss._replace(total=loss.total + (0.02 * loss.n_tokens if dispatch._choice == "torch" else 0))

    monkeypatch.setattr(type(gpt.state.model), "forward", different)
    with pytest.raises(WrongResultError, match="by kernels"):
        gpt.check()


def test_weights_drawn_on_the_device() -> None:
    """They are of another distribution than in training, or training draws its own that way from then on."""
    before = weights.by_path
    for name in ("gpt", "ngpt"):
        found = build(name, "debug:32", "cpu").state.model
        expected = build_state(make_config(name, "debug:32", "cpu")).model
        for ours, other in zip(found.parameters(), expected.parameters(), strict=True):
            assert ours.std().item() == pytest.approx(other.std().item(), rel=0.05)
            assert torch.equal(ours, other) == (ours.ndim == 1)
    assert weights.by_path is before


def test_steps_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared is left out, or its ratio is to another's time."""
    for name in ("ROUNDS", "PUBLIC_ROUNDS", "ABLATION_ROUNDS"):
        monkeypatch.setattr(paper_steps, name, 1)
    entries = {entry.name: entry for entry in paper_steps.bench("debug:16", "debug:16", "cpu")}
    others = [paper_steps.PUBLIC_STYLE, "ngpt, kernels=torch", *(f"ngpt without {x}" for x in paper_steps.OPERATIONS)]
    beside = {"gpt": "gpt", "ngpt": "gpt"} | dict.fromkeys(others, "ngpt")
    assert {name: entry.relative_to for name, entry in entries.items()} == {
        f"debug, 16 tokens: {name}": f"debug, 16 tokens: {other}" for name, other in beside.items()
    }
    for entry in entries.values():
        assert entry.rate == pytest.approx(1e3 * 8 * 16 / entry.median_ms)
        assert entry.more["mfu"] is None, "the peak of a CPU is guessed"
