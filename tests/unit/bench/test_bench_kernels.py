"""`bench kernels`: right first, then fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ngpt_train.__main__ import main
from ngpt_train.bench import kernels
from ngpt_train.kernels.check import cases
from ngpt_train.kernels.sphere_step import HiddenState

CPU = torch.device("cpu")
SMALL = kernels.Sizes(2, 8, 50, 2)
OPERATIONS = ["sphere_step", "swiglu with scales", "swiglu", "rotary of nGPT", "rotary of GPT", "linear_cross_entropy"]
OPERATIONS += ["adam_rows_"]


def test_bench_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An operation is left out, an error is lost on its way, times are of something else than the pass they name."""
    monkeypatch.setattr(kernels, "ON_CPU", SMALL)
    out = tmp_path / "kernels.json"
    assert (
        main(["bench", "kernels", "model.d_model=64", "model.n_heads=2", "train.device=cpu", f"bench.out={out}"]) == 0
    )
    printed = capsys.readouterr().out
    entries = {entry["name"]: entry for entry in json.loads(out.read_text())["entries"]}
    for operation in OPERATIONS:
        assert f"{operation}, d 64: relative errors output 1" in printed
        alone = operation in ("linear_cross_entropy", "adam_rows_")
        for label in ["", ""] if alone else [", forward", ", forward and backward"]:
            ours, eager = (entries[f"{operation}, d 64{label}: {who}"] for who in ("ours", "eager"))
            assert ours["relative_to"] == eager["name"]
            assert 0 < ours["error"] < 1e-5
            assert eager["ratio"] == 1
            assert min(ours["ratio"], ours["median_ms"]) > 0


def test_a_wrong_kernel_is_never_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel whose one gradient is off by a per mille passes, or other operations are timed before it is refused."""
    right = cases.swiglu.swiglu

    def wrong(uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None) -> Tensor:
        y = right(uv, s_u, s_v)
        return y if s_u is None else y + 1e-3 * (s_u - s_u.detach())

    wrong.formula = right.formula
    monkeypatch.setattr(cases.swiglu, "swiglu", wrong)
    monkeypatch.setattr(kernels, "times", lambda *_: pytest.fail("timed"))
    with pytest.raises(kernels.KernelError, match=r"swiglu with scales, d 64 is wrong.*\n.*gradient 2"):
        next(kernels.bench(CPU, [(64, 128, 32)], SMALL))
    assert " ms" not in capsys.readouterr().out


@pytest.mark.parametrize("how", ["nan", "unwritten", "input overwritten"])
def test_what_a_kernel_leaves_behind(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN compares as small; a row never written happens to hold what was there before; inputs are changed, and the
    reference sees them so."""
    formula = cases.sphere_step.sphere_step.formula

    def wrong(h: HiddenState, x: Tensor, alpha: Tensor) -> HiddenState:
        out, _ = formula(h, x, alpha)
        if how == "nan":
            out = out * float("nan")
        elif how == "unwritten":
            rest = torch.empty_like(out[1:])
            assert rest.isnan().all()
            out = torch.cat([out[:1], rest])
        else:
            h.to_move.data.mul_(2)
            out, _ = formula(h, x, alpha)
        return HiddenState(out, out.view_as(out))

    wrong.formula = formula
    monkeypatch.setattr(cases.sphere_step, "sphere_step", wrong)
    with pytest.raises(kernels.KernelError, match="sphere_step"):
        next(kernels.bench(CPU, [(64, 128, 32)], SMALL))
