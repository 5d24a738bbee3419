"""A row of each of the papers' tables: three steps at scale=debug, and the last of them again."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.config import list_experiments
from tests.processes.runs import arguments, began_at, numbers, run

SAMPLE = [
    "ngpt_runs/ngpt_1b_8k_alpha_scale_0.1",
    "ngpt_table4/s_z_init_sqrt_d",
    "ngpt_table5/s_qk_s_uv_fixed_s_z_scalar",
    "ngpt_table6/no_qk_norm",
    "ngpt_appendix/a3_riemannian",
    "normformer_text/normformer_125m_res_scale_both",
    "normformer_figure5/normformer_res_scale_125m",
    "normformer_table1/normformer_125m",
    "normformer_table2/gpt3_125m_high_lr",
    "normformer_table3/normformer",
    "normformer_table3_glue/normformer_res_scale_rte",
    "normformer_table4/qkv_norm",
    "normformer_table5/baseline_clip_0.1",
    "normformer_figure3/post_ln",
    "normformer_table6/normformer",
    "normformer_table8/r19",
    "powernorm_table1/iwslt14_pn",
    "powernorm_table1/wmt14_pn_v",
    "powernorm_table2/ptb_pn_0.95_0.99",
    "powernorm_table2/wikitext103_layer",
    "engpt/bf16",
    "tnt_table2/n_transformer_gelu",
    "tnt_table2/baseline_512",
    "tnt_table4/n_transformer_mrpc",
]


def other_text(row: str, directory: Path) -> list[str]:
    """The arguments for a row that learns translations or labels: text of the form that it reads."""
    table = row.split("/")[0]
    if table == "powernorm_table1":
        for split, n in (("train", 60), ("valid", 8)):
            for language in ("de", "en"):
                (directory / f"{split}.{language}").write_text("".join(f"{language} {k} a@@ b\n" for k in range(n)))
        files = [f"data.path={directory / 'train'}", f"data.val_files={directory / 'valid'}"]
        return [*files, "tokenizer=words", "train.batch_rows=16"]
    if table in ("tnt_table4", "normformer_table3_glue"):
        examples = [{"sentence1": f"a {k}", "sentence2": "b", "label": k % 2} for k in range(60)]
        for split, of_split in (("train", examples), ("validation", examples[:20])):
            (directory / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in of_split))
        return [f"data.path={directory / 'train.jsonl'}", f"data.val_files={directory / 'validation.jsonl'}"]
    return []


def test_every_table_is_in_the_sample() -> None:
    tables = {name.split("/")[1] for name in list_experiments() if name.startswith("paper/")}
    assert tables == {row.split("/")[0] for row in SAMPLE}


@pytest.mark.parametrize(
    ("row", "parameters"), [("ngpt_runs/gpt_1b_8k", "1,025,731,840"), ("tnt_table2/baseline_gelu", "333,927,936")]
)
def test_plan_is_a_command(row: str, parameters: str) -> None:
    """Without a network, a vocabulary or a cache."""
    planned = run("plan", [f"experiment=paper/{row}"], code=0)
    assert re.search(rf"^  total +{parameters}$", planned.stdout, re.MULTILINE)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", SAMPLE)
def test_three_steps_and_a_resume(row: str, tmp_path: Path, corpus: Path) -> None:
    """Caught: options of a row that a checkpoint does not keep, a row that only its own scale can run."""
    given = [x for x in arguments(tmp_path, corpus, "train.steps=3", "checkpoint.every=2") if x != "model=ngpt"]
    given += ["data.files=null", "model.context=64", "model.vocab_size=auto"]  # no files of the hub, and a small model
    if more := other_text(row, tmp_path):
        replaced = {name.split("=")[0] for name in more} | ({"data"} if "tokenizer=words" in more else set())
        given = [argument for argument in given if argument.split("=")[0] not in replaced] + more
    command = ["train", f"experiment=paper/{row}", *given]
    run_directory = tmp_path / "runs/test"
    assert main(command) == 0
    whole = numbers(run_directory)
    assert sorted(whole) == [1, 2, 3]
    shutil.rmtree(run_directory / "checkpoints/step_00000003")
    assert main(command) == 0
    assert numbers(run_directory) == whole
    assert began_at(run_directory)[-1] == 2
