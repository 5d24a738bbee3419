"""A composed model of RoBERTa's form as RobertaForMaskedLM, and back."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ngpt_train.__main__ import main
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts import chosen_layout
from ngpt_train.interop.layouts.roberta import FORM, RobertaLayout
from ngpt_train.models.composed.keys import ComposedConfig
from tests.processes.runs import arguments, write_corpus
from tests.unit.interop.test_llama import brought_back, in_transformers, jittered

SIZES = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_mlp": 96, "vocab_size": 61, "context": 24}
CONFIG = ComposedConfig(psi_warmup_steps=0, group_scaling=0, norm_eps=1e-5, **SIZES, **FORM)


def test_there_and_back(tmp_path: Path) -> None:
    """Caught: a matrix that is not transposed, positions from 2 on, a norm in another's place, a tanh in the head or
    the tanh form of GELU, a lost bias of the output."""
    model, weights = jittered(CONFIG)
    layout = chosen_layout("auto", CONFIG)
    assert layout.name == "roberta"
    there = {**layout.config_json(CONFIG), "ngpt_train": {"layout": "roberta"}}
    _, foreign = brought_back(layout, CONFIG, there, weights)
    with pytest.raises(DataError, match="only exports of ours"):
        layout.from_foreign({**there, "ngpt_train": None}, foreign)

    exported = in_transformers("AutoModelForMaskedLM", tmp_path, there, foreign)
    rows = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = exported(rows).logits
        torch.testing.assert_close(found, model(rows), rtol=0, atol=1e-5)
        assert found.abs().max() > 1


@pytest.mark.parametrize("change", [{"norm_placement": "pre"}, {"qk_norm": True}, {"n_kv_heads": 2}, {"norm": "rms"}])
def test_other_forms_are_refused(change: dict[str, object]) -> None:
    config = replace(CONFIG, **change)
    assert f"model.{next(iter(change))}" in (RobertaLayout().refusal(config) or "")
    assert chosen_layout("auto", config).name == "safetensors"


def test_a_run_is_exported(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text.txt")
    form = [f"model.{name}={value}".lower() for name, value in FORM.items() if name != "bidirectional"]
    options = ["model=composed", "objective=masked", *form, "optim.lr=1e-3", "train.steps=4", "run.name=r"]
    assert main(["train", *arguments(tmp_path, text, *options)]) == 0
    out = tmp_path / "out"
    assert main(["export", f"export.checkpoint={tmp_path}/runs/r", f"export.out={out}", "export.rows=2"]) == 0
    card = (out / "README.md").read_text()
    assert "RobertaForMaskedLM and ngpt-train" in card
    assert "AutoModelForMaskedLM.from_pretrained" in card
    assert "AutoModelForCausalLM" not in card
    assert "pipeline_tag: fill-mask" in card
