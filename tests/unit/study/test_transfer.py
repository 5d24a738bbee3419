"""The drift of the best learning rate, planted: verdicts and intervals of the fit, and the output of `transfer`."""

import json
import math
import os
import shlex
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngpt_train.__main__ import main
from ngpt_train.config import ConfigError
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.sections.lr_table import problem_of
from ngpt_train.config.yaml_files import parse
from ngpt_train.study import runner
from ngpt_train.study.cost import ArmSize
from ngpt_train.study.definition import Study, read_stored, write_study
from ngpt_train.study.drift import Drift, Rate, axes_of, fit_drift, read_optima
from ngpt_train.study.points import Point, Runs
from ngpt_train.study.transfer_report import left_out, table_entries
from ngpt_train.verbs.transfer import arms_of_sizes
from tests.planted_runs import write_run
from tests.unit.study.small_study import FakeEngine, leave

WIDTHS, BUDGETS, SEEDS = (32, 64, 128), (25_600, 51_200), (0, 1)
TOKENS = 512  # of a step at scale=debug
OPTIMUM = 0.04


def optimum(width: int, budget: int) -> float:
    """Planted: half an octave lower for each octave of width, the same for all budgets."""
    return OPTIMUM * (width / 64) ** -0.5


def planted(root: Path, budgets: tuple[int, ...] = BUDGETS, edge: int | None = None) -> Path:
    """A study of nGPT at three widths; at the width `edge` the best rate is the highest."""
    rng = np.random.default_rng(0)
    arms: dict[str, tuple[str, ...]] = {
        f"ngpt-d{width}-L2": (f"model.d_model={width}", f"model.n_heads={width // 32}") for width in WIDTHS
    }
    shared = ("model=ngpt", "scale=debug")
    study = Study("planted", root, "ngpt-d32-L2", arms, shared, budgets, {"optim.lr": 2.0}, SEEDS)
    write_study(study)
    for width, arm in zip(WIDTHS, arms, strict=True):
        for budget in budgets:
            steps, best = budget // TOKENS, optimum(width, budget)
            config = {"model.d_model": width, "model.n_heads": width // 32, "model.n_layers": 2}
            for octave in range(-2, 1 if width == edge else 3):
                for seed in SEEDS:
                    lr = float(f"{OPTIMUM * 2.0**octave:.6g}")
                    far = 3 - octave if width == edge else math.log2(lr / best)
                    loss = 3 + 0.1 * far**2 + rng.normal(0, 0.002)
                    path = study.runs / f"{arm}-{budget}-lr{lr:g}-seed{seed}"
                    write_run(path, "ngpt", steps, seed, loss, lr, config=config)
    return study.path


SIZES = (64, 128, 256, 512)


def rates(slope: float, halves: list[float], errors: list[float] | None = None) -> list[Rate]:
    """Best rates 0.02 (size / 64)^slope with intervals of +- so many octaves, off by `errors` octaves."""
    found: list[Rate] = []
    for size, half, error in zip(SIZES, halves, errors or [0.0] * 4, strict=False):
        lr = 0.02 * (size / 64) ** slope * 2**error
        found.append((lr, lr * 2**-half, lr * 2**half))
    return found


def drift_of(of: list[Rate], within: float = 0.5) -> Drift:
    return fit_drift(SIZES[: len(of)], of, within, 0.95)


def width_of(drift: Drift) -> float:
    assert drift.low is not None
    assert drift.high is not None
    return drift.high - drift.low


@pytest.mark.parametrize(
    ("slope", "half", "verdict"), [(0.5, 0.1, "drifts"), (-0.05, 0.1, "transfers"), (-0.05, 1.0, "not resolved")]
)
def test_verdicts(slope: float, half: float, verdict: str) -> None:
    """Caught: a drift per octave of size for that over the range; a rate that transfers for want of data."""
    drift = drift_of(rates(slope, [half] * 4))
    assert drift.verdict == verdict
    assert drift.octaves == pytest.approx(3 * slope)
    assert drift.slope == pytest.approx(slope)
    # Of four equal points at 0, 1, 2, 3 octaves: 3 octaves times half / sqrt(5).
    assert [drift.low, drift.high] == pytest.approx([3 * slope - 3 * half / 5**0.5, 3 * slope + 3 * half / 5**0.5])


def test_within_is_of_the_interval_and_not_of_the_estimate() -> None:
    """0.3 octaves within +- 0.25: neither inside half an octave, nor 0."""
    two: list[Rate] = [(0.01, 0.01, 0.01), (0.01 * 2**0.3, 0.01 * 2**0.05, 0.01 * 2**0.55)]
    assert drift_of(two).verdict == "drifts"
    assert drift_of(two, within=0.6).verdict == "transfers"


def test_what_counts_in_a_fit() -> None:
    """Caught: an unweighted fit; an interval that points off the line do not widen; an interval from one seed, whose
    noise is not known."""
    drift = drift_of(rates(0.0, [0.05, 0.05, 0.05, 3.0], [0.0, 0.0, 0.0, -2.0]))
    assert abs(drift.octaves) < 0.05
    assert drift.verdict == "transfers"
    bent = drift_of(rates(0.2, [0.1] * 4, [0.0, 0.6, -0.6, 0.0]))
    assert width_of(bent) > 4 * width_of(drift_of(rates(0.2, [0.1] * 4)))
    unknown = drift_of([*rates(-1.0, [0.1] * 3), (0.0025, None, None)])
    assert (unknown.low, unknown.high, unknown.verdict) == (None, None, "not resolved")
    assert unknown.octaves == pytest.approx(-3)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("slope", [0.0, -0.5])
def test_the_interval_covers_the_truth(n: int, slope: float) -> None:
    """1,000 draws whose optima have the noise that their intervals say. Caught: intervals of the slope for the range's,
    a factor for scatter that makes them narrow. That factor makes them wider than nominal where points are few."""
    rng, halves, covered = np.random.default_rng(0), [0.2, 0.4, 0.3, 0.6], 0
    z = 1.959964
    for _ in range(1000):
        errors = [rng.normal(0, half / z) for half in halves[:n]]
        drift = drift_of(rates(slope, halves[:n], errors))
        truth = slope * math.log2(SIZES[n - 1] / SIZES[0])
        covered += width_of(drift) > 0 and float(drift.low or 0) <= truth <= float(drift.high or 0)
    assert 0.935 <= covered / 1000 <= 0.99


def test_a_planted_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: an axis that mixes budgets, entries that a recipe does not take."""
    path = planted(tmp_path)
    assert main(["transfer", str(path), f"transfer.out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "transfer.json").read_text())
    axes = {(axis["axis"], *axis["at"].values()): axis for axis in report["axes"]}
    assert list(axes) == [("width", 2, b) for b in BUDGETS] + [("horizon", w, 2) for w in WIDTHS]
    for (name, *_), axis in axes.items():
        truth = -1.0 if name == "width" else 0.0
        assert axis["octaves"] == pytest.approx(truth, abs=0.1)
        assert axis["low"] - 0.02 <= truth <= axis["high"] + 0.02  # test_the_interval_covers_the_truth has how often
        assert axis["verdict"] == ("drifts" if name == "width" else "transfers")
        assert axis["sentence"] in said
    assert [one["width"] for one in report["optima"]] == [32, 32, 64, 64, 128, 128]
    for one in report["optima"]:
        assert one["lr"] == pytest.approx(optimum(one["width"], one["tokens"]), rel=0.03)
        assert one["seeds"] == 2
    assert report["left_out"] == []
    for kind in ("png", "svg"):
        assert (tmp_path / "out" / f"transfer.{kind}").stat().st_size > 5000
    entries = parse("\n".join(line for line in said.splitlines() if line.startswith("- {")))
    assert problem_of({"debug": {64: entries[:2]}}) is None
    rates = [(float(f"{one['lr']:.3g}"), one["tokens"], "ngpt") for one in report["optima"]]
    assert [(one["lr"], one["tokens"], one["model"]) for one in entries] == rates
    assert entries[0]["source"].startswith("transfer, 2 seeds, 0.05")
    assert entries[0]["optim"] == "adamw", "Muon would take the rate"


def test_an_untuned_size_is_left_out_and_said(tmp_path: Path) -> None:
    """Caught: a best value at the edge of its grid in the fit, or as an entry of a table."""
    optima = read_optima([planted(tmp_path, BUDGETS[:1], edge=128)])
    (axis,) = axes_of(optima, 0.5)
    assert [one.width for one in axis.points] == [32, 64]
    assert axis.drift is not None
    assert axis.drift.octaves == pytest.approx(-0.5, abs=0.1)
    assert [one.tuning.state for one in optima.found] == ["bracketed", "bracketed", "edge"]
    (said,) = left_out(optima)
    assert said.startswith("ngpt, width 128, 2 layers, 25,600 tokens is left out: untuned")
    assert not any("width 128" in entry for entry in table_entries(optima))


def test_arms_with_rules_keep_their_names(tmp_path: Path) -> None:
    """Two arms of one architecture: the name of each, without the sizes."""
    for arm, betas in (("ngpt", [0.9, 0.95]), ("ngpt_first", [0.7, 0.95])):
        for width in WIDTHS:
            config = {"model.d_model": width, "model.n_heads": width // 32, "model.n_layers": 2, "optim.betas": betas}
            for lr in (0.02, 0.04, 0.08):
                path = tmp_path / f"{arm}-d{width}-L2-25600-lr{lr}-seed0"
                write_run(path, "ngpt", 25_600 // TOKENS, 0, 3 + abs(math.log2(lr / 0.04)), lr, config=config)
    assert [one.architecture for one in read_optima([tmp_path]).found] == ["ngpt"] * 3 + ["ngpt_first"] * 3


def test_arms_of_sizes() -> None:
    """Caught: heads that become wider, an MLP that keeps its width, the own size twice."""
    base = ModelConfig("gpt", d_model=1024, n_layers=24, n_heads=16, n_kv_heads=4, d_mlp=2816)
    found = arms_of_sizes({"gpt": {"model": "gpt"}}, {"gpt": base}, [512, 1024], [12, 24])
    half = {"model": "gpt", "model.d_model": 512, "model.n_heads": 8, "model.n_kv_heads": 2, "model.d_mlp": 1408}
    assert found == {
        "gpt-d512-L24": half,
        "gpt-d1024-L24": {"model": "gpt"},
        "gpt-d1024-L12": {"model": "gpt", "model.n_layers": 12},
    }
    with pytest.raises(ConfigError, match=r"transfer\.widths=\[100\]"):
        arms_of_sizes({"gpt": {}}, {"gpt": base}, [100], [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=ngpt", "transfer.widths=[128,128]"], ["two sizes or more", "transfer.widths"]),
        (["model=ngpt", "transfer.widths=[64,72]", "scale=debug"], ["transfer.widths=[72]", "head"]),
        (["studies/x", "transfer.widths=[64,128]"], ["transfer.widths", "no run is made"]),
        (["studies/x", "model=gpt"], ["model", "no run is made"]),
    ],
)
def test_mistakes(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", *arguments]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_a_transfer_that_is_interrupted_is_completed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a report of the runs that had ended; an error because none had; a stored command that is `study`'s; arms
    that are others at the next start; a report that is not written at the end."""
    monkeypatch.setattr(runner, "measure", lambda configs, *_: dict.fromkeys(configs, ArmSize(1, 1, None, "")))
    monkeypatch.setattr(runner, "local_engine", lambda config, gpus, cores, runs: engine)
    given = ["model=ngpt", "scale=debug", "data=embedded", "tokenizer=bytes", "train.device=cpu"]
    given += ["transfer.widths=[32,64]", "study.budgets=[51200]", "study.seeds=[0]", f"study.root={tmp_path}"]
    root = tmp_path / "transfer-ngpt-debug"
    stored = cache(lambda: Runs(read_stored(root)))
    seen: list[list[str]] = []

    def outcome(_: Any, point: Point, attempt: int) -> tuple[int | None, str]:
        runs = stored()
        if not seen:
            os.kill(os.getpid(), signal.SIGINT)
            leave(runs, point, {"reason": "stopped by SIGTERM", "step": 3})
        else:
            leave(runs, point, {}, 3 + (math.log2(float(dict(point.values)["optim.lr"]) / 0.02)) ** 2)
        return 0, ""

    for last_line in ("interrupted: 0 runs have ended", "written to"):
        engine = FakeEngine(None, outcome)
        assert main(["transfer", *given]) == 0
        seen.append(capsys.readouterr().out.splitlines())
        assert seen[-1][-1].startswith(last_line)
        assert (root / "transfer" / "transfer.json").exists() == (last_line == "written to")
    assert shlex.split(read_stored(root).command) == ["python", "-m", "ngpt_train", "transfer", *given]
