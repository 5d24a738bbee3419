"""A row of each of the papers' tables: three steps at scale=debug, stopped and resumed."""

import re
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.config import list_experiments
from ngpt_train.verbs import train
from tests.processes.runs import arguments, numbers, run

SAMPLE = [
    "ngpt_runs/ngpt_1b_8k_alpha_scale_0.1",
    "ngpt_table4/s_z_init_sqrt_d",
    "ngpt_table5/s_qk_s_uv_fixed_s_z_scalar",
    "ngpt_table6/no_qk_norm",
    "normformer_figure5/normformer_res_scale_125m",
    "normformer_table1/normformer_125m",
    "normformer_table2/gpt3_125m_high_lr",
    "normformer_table4/qkv_norm",
    "normformer_table5/baseline_clip_0.1",
    "normformer_figure3/post_ln",
    "normformer_table6/normformer",
    "normformer_table8/r19",
    "powernorm_table2/ptb_pn_0.95_0.99",
    "powernorm_table2/wikitext103_layer",
    "engpt/bf16",
    "tnt_table2/n_transformer_gelu",
    "tnt_table2/baseline_512",
]


def test_every_table_is_in_the_sample() -> None:
    tables = {name.split("/")[1] for name in list_experiments() if name.startswith("paper/")}
    assert tables == {row.split("/")[0] for row in SAMPLE}


@pytest.mark.parametrize(
    ("row", "parameters"), [("ngpt_runs/gpt_1b_8k", "1,025,731,840"), ("tnt_table2/baseline_gelu", "333,927,936")]
)
def test_plan_is_a_command(row: str, parameters: str) -> None:
    """As typed, in a process of its own, without a network, a vocabulary or a cache."""
    planned = run("plan", [f"experiment=paper/{row}"])
    assert (planned.returncode, "Traceback" in planned.stderr) == (0, False)
    assert re.search(rf"^  total +{parameters}$", planned.stdout, re.MULTILINE)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 33 runs, they would take a fifth of the time."""
    monkeypatch.setattr(train, "plot_run", lambda directory: None)


@pytest.mark.parametrize("row", SAMPLE)
def test_three_steps_and_a_resume(row: str, tmp_path: Path, corpus: Path) -> None:
    """Caught: options of a row that a checkpoint does not keep, a row that only its own scale can run."""
    ended = {}
    for name, stops in (("whole", [3]), ("parts", [2, 3])):
        given = [
            override
            for override in arguments(tmp_path, corpus, "train.steps=3", "checkpoint.every=2", f"run.name={name}")
            if override != "model=ngpt"
        ]
        given.append("data.files=null")  # of the hub, which a table may name
        for stop in stops:
            row_of_table = f"experiment=paper/{row}"
            assert main(["train", row_of_table, *given, "model.context=64", f"train.stop_at={stop}"]) == 0
        ended[name] = numbers(tmp_path / "runs" / name)
    assert sorted(ended["whole"]) == [1, 2, 3]
    assert ended["parts"] == ended["whole"]
