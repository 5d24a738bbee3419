"""What a run says before it begins, and its plan as well: of text that is read many times, and where its lr is from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from tests.processes.runs import arguments, records, run

MANY = ("train.steps=500", "train.stop_at=1")  # 256,000 tokens of some 35,000


def log_of(directory: Path) -> list[str]:
    """The lines of all starts, without their times."""
    lines = (directory / "runs/test/logs/rank_0.log").read_text().splitlines()
    return [line.split("  ", 1)[1] for line in lines]


def train(directory: Path, corpus: Path, *overrides: str, ranks: int = 1) -> list[str]:
    run("train", arguments(directory, corpus, *overrides), ranks, code=0)
    return log_of(directory)


@pytest.mark.parametrize(("streaming", "ranks"), [(False, 2), (True, 1)])
def test_many_epochs(tmp_path: Path, corpus: Path, streaming: bool, ranks: int) -> None:
    """Once, whatever the number of ranks, and before the first step."""
    options = [f"data.streaming={str(streaming).lower()}", "data.streams=8", "optim.lr=1e-2"]
    log = train(tmp_path, corpus, *options, *MANY, ranks=ranks)
    (warning,) = [line for line in log if "reads the training text" in line]
    assert warning.startswith("warning: train.steps=500 reads the training text")
    assert warning.count("about ") == (2 if streaming else 0)
    assert "Take more text, or set train.steps to " in warning
    assert log.index(warning) < next(number for number, line in enumerate(log) if line.startswith("eval "))
    assert not any(line.startswith("lr from") for line in log)  # the user has set it

    finished = run("plan", arguments(tmp_path, corpus, *options, *MANY, "model.vocab_size=257"))
    assert "warning: train.steps=500 reads the training text about " in finished.stdout


def test_few_epochs(tmp_path: Path, corpus: Path) -> None:
    """Caught: a warning for a run that reads its text once; a rate whose source is not said."""
    options = ["train.steps=50", "train.stop_at=1"]
    log = train(tmp_path, corpus, *options)
    assert not any("reads the training text" in line for line in log)
    (said,) = [line for line in log if line.startswith("lr from ")]
    assert said == "lr from our sweep, docs/benchmarks/initialisation.md (25.6 thousand tokens at context 64)"
    finished = run("plan", arguments(tmp_path, corpus, *options, "model.vocab_size=257"))
    assert "reads the training text" not in finished.stdout
    assert said in finished.stdout.splitlines()


def test_an_lr_from_an_extrapolation(tmp_path: Path, corpus: Path) -> None:
    """Caught: a resume with more steps that takes the rate of the table for those, or says another source."""
    (tmp_path / "recipe").mkdir()
    entries = "[{steps: 4, lr: 1.0e-2, source: few steps}, {steps: 100, lr: 1.0e-3, source: many steps}]"
    recipe = f"# @package _global_\ndefaults: [ngpt]\noptim: {{lr_table: {{debug: {{64: {entries}}}}}}}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(recipe)
    given = ["--config-dir", str(tmp_path), *arguments(tmp_path, corpus, "recipe=mine", "train.steps=1")]
    assert main(["train", *given]) == 0
    said = "lr from an extrapolation: few steps (4 steps at context 64); this run has 1 step at context 64"
    assert [line for line in log_of(tmp_path) if line.startswith("lr ")] == [said]
    assert records(tmp_path / "runs/test")[1]["lr"] == 1e-2

    given = [argument.replace("train.steps=1", "train.steps=60") for argument in [*given, "train.stop_at=2"]]
    assert main(["train", *given]) == 0
    assert [line for line in log_of(tmp_path) if line.startswith("lr ")] == [said, said]
    assert records(tmp_path / "runs/test")[2]["lr"] == pytest.approx(1e-2, rel=1e-2)  # cosine over 60 steps

    assert main(["plan", *given, "model.vocab_size=257", f"plan.out={tmp_path / 'plan.json'}"]) == 0
    planned = json.loads((tmp_path / "plan.json").read_text())
    assert planned["lr"] == 1e-3
    assert planned["notes"][0] == "lr from many steps (100 steps at context 64)"
    assert planned["epochs"][""]["epochs"] == pytest.approx(2 * 512 / 35_000, rel=0.2)
