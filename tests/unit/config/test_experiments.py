"""Experiments by name: tables and their rows, what overrides what. The papers' tables are in
test_papers.py."""

from pathlib import Path
from typing import Any

import pytest

from ngpt_train.__main__ import main
from ngpt_train.config import ConfigError, load_config
from ngpt_train.config.stored import to_yaml

TABLE = """\
# @package _global_
defaults:
  - override /model: ngpt
  - override /scale: 0.5b
  - _self_
optim: {lr: 1.0e-3, clip_norm: 0.5}
train: {batch_rows: 12}
model: {rope_base: 100}
rows:
  plain: {}
  rows: {train.batch_rows: 24}
  tokens: {train.batch_tokens: 4096}
  other: {model: gpt, scale: debug, recipe: normformer, optim.lr: 2.0e-3, train.steps: 7}
  s_qk: {model.s_qk.init: 1/L, model.rope_base: 200, run.name: mine}
  "1.5": {run.root: "${oc.env:HOME}/x"}
"""


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "experiment" / "my").mkdir(parents=True)
    (tmp_path / "experiment" / "my" / "table.yaml").write_text(TABLE)
    return str(tmp_path)


def test_command_line_over_row_over_table(directory: str) -> None:
    def row(name: str, *arguments: str) -> Any:
        return load_config([f"experiment=my/table/{name}", *arguments], directory)

    plain, s_qk = row("plain"), row("s_qk")
    assert (plain.optim.lr, plain.train.batch_rows, plain.model.rope_base, plain.scale.name) == (1e-3, 12, 100, "0.5b")
    assert (s_qk.model.s_qk.init, s_qk.model.rope_base, s_qk.optim.lr) == ("1/L", 200, 1e-3)
    over = row("s_qk", "model.s_qk.init=2", "optim.lr=4")
    assert (over.model.s_qk.init, over.model.rope_base, over.optim.lr) == (2, 200, 4)
    assert row("plain", "model.rope_base=2").model.rope_base == 2

    other = row("other", "model.context=64")
    assert (type(other.model).__name__, other.scale.name, other.model.n_layers) == ("GPTConfig", "debug", 2)
    assert (other.optim.lr, other.optim.clip_norm, other.train.steps, other.schedule.kind) == (2e-3, 0.5, 7, "linear")
    over = row("other", "scale=tiny", "model=normformer", "model.rope_base=10000", "recipe=gpt", "optim.lr=3")
    assert (over.model.name, over.scale.name, over.model.n_layers) == ("normformer", "tiny", 4)
    assert (over.optim.lr, over.train.steps, over.schedule.kind) == (3.0, 7, "cosine")
    assert row("plain", "scale=debug").scale.name == "debug"


def test_the_later_of_batch_rows_and_batch_tokens_counts(directory: str) -> None:
    def batch(name: str, *arguments: str) -> tuple[int | None, int | None]:
        train = load_config([f"experiment=my/table/{name}", "model.context=256", *arguments], directory).train
        return train.batch_rows, train.batch_tokens

    assert batch("plain") == (12, 3072)
    assert batch("rows") == (24, 6144)
    assert batch("tokens") == (16, 4096)
    assert batch("tokens", "train.batch_rows=5") == (5, 1280)
    assert batch("rows", "train.batch_tokens=512") == (2, 512)


def test_run_name(directory: str) -> None:
    def name(row: str, *arguments: str) -> str:
        return load_config([f"experiment=my/table/{row}", *arguments], directory).run.name

    assert name("plain") == "table-plain-0.5b-seed0"
    assert name("plain", "scale=debug", "run.seed=3") == "table-plain-debug-seed3"
    assert (name("s_qk"), name("s_qk", "run.name=his")) == ("mine", "his")


def test_own_experiment_upon_a_row(directory: str) -> None:
    path = Path(directory) / "experiment" / "upon.yaml"
    path.write_text("# @package _global_\ndefaults:\n  - my/table/s_qk\n  - _self_\nmodel: {s_qk: {scale: 2}}\n")
    config: Any = load_config(["experiment=upon"], directory)
    assert (config.model.s_qk.init, config.model.s_qk.scale, config.optim.clip_norm) == ("1/L", 2.0, 0.5)
    path.write_text("# @package _global_\ndefaults:\n  - my/table\n")
    with pytest.raises(ConfigError, match=r"experiment=my/table: several.*\n.*plain, rows, tokens(.|\n)*upon\.yaml"):
        load_config(["experiment=upon"], directory)


def test_shadowed_table(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(directory) / "experiment" / "paper" / "ngpt_table6.yaml"
    path.parent.mkdir()
    path.write_text("# @package _global_\nrows:\n  own: {}\n")
    load_config(["experiment=paper/ngpt_table6/baseline"], directory)
    assert f"{path} is not used" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"paper/ngpt_table6 has baseline, no_qk_norm"):
        load_config(["experiment=paper/ngpt_table6/own"], directory)


def test_command_line_tools(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "experiment=my/table/s_qk", "--config-dir", directory, "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip() == to_yaml(load_config(["experiment=my/table/s_qk"], directory)).rstrip()
    assert "rows:\n" not in printed  # the table's key; batch_rows and micro_rows have a value
    arguments = ["-m", "experiment=my/table/plain,my/table/other", "model.context=64"]
    assert main(["train", *arguments, "--config-dir", directory, "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    assert "name: table-plain-0.5b-seed0/0\n" in printed
    assert "name: table-other-debug-seed0/1\n" in printed
    assert main(["train", "experiment=my/table/other", "--config-dir", directory, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "my/table/ plain rows tokens [other] s_qk 1.5\n" in printed
    assert "paper/ngpt_table6/ baseline no_qk_norm\n" in printed
    assert "optim.lr=0.002 " in printed
