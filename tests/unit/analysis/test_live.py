"""Figures over steps from telemetry records, and the runs that they are of."""

import json
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.analysis.measures.of_run import OfRun
from ngpt_train.analysis.paper_figures import measure
from ngpt_train.analysis.run_contents import names_of, records, run_directory
from ngpt_train.config import load_config
from ngpt_train.core.errors import ConfigError

MODEL = load_config(["scale=debug", "model=powernorm", "tokenizer=bytes", "model.d_model=32"]).model


def run_of(name: str, factor: float, first: int = 2) -> OfRun:
    telemetry = [
        {
            "kind": "telemetry",
            "step": step,
            "grad_l1/layers.0.wq": factor * step,
            "grad_l1/layers.1.w_down": None if step == 4 else factor,
            "grad_l1/layers.0": 99.0,
            "psi_distance/layers.0.norm_attn": 64.0 * step,
            "value_min/layers.0.norm_ffn": -1.0,
            "value_mean/layers.0.norm_ffn": 0.5,
        }
        for step in range(first, 8, 2)
    ]
    train = [{"kind": "train", "step": step, "loss": 2.0 * factor} for step in (2, 6)]
    return OfRun(name, MODEL, telemetry=telemetry, train=train)


def test_records_become_curves() -> None:
    """Caught: a distance that is not divided by d; a null as 0; the sum of a layer among its weights; the loss of
    another step."""
    runs = [run_of("a", 1.0), run_of("b", 3.0, first=4)]
    found = measure(runs, ["normformer_3_live", "normformer_4_live", "normformer_7_live", "powernorm_4_live"]).curves
    (curve,) = found["powernorm_4_live"]["a"]
    assert (curve.panel, curve.name) == ("psi", "layer 0 norm_attn")
    assert curve.x.tolist() == [2, 4, 6]
    assert curve.y.tolist() == [4, 8, 12]
    (curve,) = found["normformer_3_live"]["a"]
    assert (curve.name, curve.x.tolist()) == ("layer 1", [2, 6])
    assert {(c.name, c.y[0]) for c in found["normformer_4_live"]["a"]} == {("layer 0 least", -1), ("layer 0 mean", 0.5)}
    ratios = {curve.panel: curve for curve in found["normformer_7_live"]["b"]}
    assert ratios["wq"].x.tolist() == [6], "both have a record and a loss"
    assert ratios["wq"].y.tolist() == [(3 * 6 / 6) / (6 / 2)]
    assert set(ratios) == {"wq", "w_down"}


def test_runs_of_checkpoints(tmp_path: Path) -> None:
    """Caught: two checkpoints of a run, or two runs of a name, that are one in the figures; records cut by a kill."""
    a, b = tmp_path / "x/gpt/checkpoints/step_00000004", tmp_path / "x/gpt/checkpoints/step_00000008"
    other = tmp_path / "y/gpt/checkpoints/step_00000008"
    assert names_of([a, other.parent.parent / "../ngpt/checkpoints/step_00000001"], [4, 1]) == ["gpt", "ngpt"]
    assert names_of([a, b], [4, 8]) == ["gpt step 4", "gpt step 8"]
    assert names_of([a, b, other], [4, 8, 8]) == [str(a), str(b), str(other)]
    assert run_directory(a) == tmp_path / "x/gpt"
    run_directory(a).mkdir(parents=True)
    lines = [json.dumps({"kind": kind, "step": k}) for k, kind in enumerate(["train", "eval", "telemetry", "train"])]
    (tmp_path / "x/gpt/metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "train", "st')
    found = records(a)
    assert [record["step"] for record in found["train"]] == [0, 3]
    assert [record["step"] for record in found["telemetry"]] == [2]
    assert records(other) == {"train": [], "telemetry": []}


def test_a_run_without_records_is_said() -> None:
    found = measure([OfRun("a", MODEL)], ["powernorm_4_live"])
    assert not found.curves
    assert "logging.telemetry=100" in found.skipped[0].why


def test_target_counts() -> None:
    """Caught: ids that do not count counted; more than the sample read."""
    import numpy as np

    from ngpt_train.evaluation.validation import target_counts

    class Rows:
        def __len__(self) -> int:
            return 600

        def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            targets = np.tile([0, 2, 2, -100], (len(indices), 1))
            return targets, targets

    assert target_counts(Rows(), 4).tolist() == [600, 0, 1200, 0]
    assert target_counts(Rows(), 4, sample=700).tolist() == [256, 0, 512, 0]


def test_figures_are_a_list() -> None:
    """Caught: an empty list; a single word that needs brackets."""
    assert load_config(["analyze.figures=ngpt_4"]).analyze.figures == ["ngpt_4"]
    assert load_config(["analyze.figures=[tnt_3,live]"]).analyze.figures == ["tnt_3", "live"]
    for given in ("[]", "3", "null"):
        with pytest.raises(ConfigError, match=r"analyze\.figures"):
            load_config([f"analyze.figures={given}"])


@pytest.mark.parametrize(
    ("verb", "given", "said"),
    [
        ("analyze", ["analyze.checkpoints=[a]", "analyze.figures=ngpt_7"], "ngpt_4"),
        ("analyze", ["analyze.checkpoints=[a]", "analyze.figures=[ngpt_4,normformr_3]"], "did you mean normformer_3"),
        ("analyze", [], "analyze.checkpoints=[runs/gpt,runs/ngpt]"),
        ("analyze", ["analyze.checkpoints=[a,a]"], "named twice"),
        ("analyze", ["analyze.checkpoints=[a]", "analyze.average=2", "analyze.weights=ema"], "average of averages"),
        ("probe", ["probe.checkpoints=[a,b,c]"], "one or two"),
    ],
)
def test_mistakes_are_told(verb: str, given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: a message without what is allowed; an exit code that is not 2."""
    assert main([verb, *given]) == 2
    assert said.lower() in capsys.readouterr().err.lower()
