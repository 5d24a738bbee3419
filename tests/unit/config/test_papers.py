"""Every row of the papers' tables as a user types it: `experiment=paper/TABLE/ROW` and nothing else, without a network.

The numbers here are copied from the papers and, where they are silent, from their authors' scripts; docs/papers.md says
which is which. Parameters are counted a second time from the papers' formulas (tests/reference), without the models.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ngpt_train.__main__ import main
from ngpt_train.config import Config, list_experiments, load_config
from ngpt_train.config.keys import AUTO
from ngpt_train.config.sections.data import is_commit
from ngpt_train.config.stored import to_dict, to_yaml
from ngpt_train.models import build_model
from ngpt_train.verbs.plan import planned_vocabulary
from tests.properties.architectures import ARCHITECTURES
from tests.unit.data.test_hub import known_to

# All rows are composed; tests/processes/test_paper_experiments.py trains one of each table.
pytestmark = pytest.mark.slow

NAMES = [name for name in list_experiments() if name.startswith("paper/")]
ROWS = {
    "engpt": 6,
    "ngpt_appendix": 6,
    "ngpt_runs": 18,  # two arms of six, A.6, figure 1's short run and 500 billion tokens
    "ngpt_table4": 14,
    "ngpt_table5": 12,
    "ngpt_table6": 2,
    "normformer_figure3": 3,
    "normformer_figure5": 12,
    "normformer_table1": 9,
    "normformer_table2": 16,
    "normformer_table3": 3,
    "normformer_table3_glue": 21,  # three models, seven tasks
    "normformer_table4": 7,
    "normformer_table5": 12,
    "normformer_table6": 2,
    "normformer_text": 8,
    "normformer_table8": 31,  # of 32: CatFormer is left out
    "powernorm_table1": 20,  # four norms on two texts, and three smaller batches of figure 5
    "powernorm_table2": 24,  # four norms and eight other pairs of alphas, on two texts
    "tnt_table2": 6,
    "tnt_table4": 16,  # two models, eight tasks
}
NO_DROPOUT, DROPOUT = (0, 0, 0), (0.1, 0.1, 0.1)  # of the embedding, the residuals, the attention


@cache
def resolved(name: str) -> Any:
    """The row's config, with the vocabulary that `plan` finds; Any, because the keys of model.* differ."""
    config = load_config([f"experiment=paper/{name}"])
    if config.model.vocab_size == AUTO:
        config.model.vocab_size = planned_vocabulary(config)
    return config


def of(table: str) -> dict[str, Any]:
    """The rows of a table by their names, in its order."""
    return {name.split("/")[2]: resolved(name[6:]) for name in NAMES if name.split("/")[1] == table}


def text_of(config: Config) -> tuple[str, str | None, str, int]:
    assert isinstance(config.model.vocab_size, int)
    return config.data.kind, config.data.repo, config.tokenizer.kind, config.model.vocab_size


def optimizer(config: Config) -> tuple[Any, ...]:
    """Betas, weight decay, clipping, schedule, where it ends."""
    optim, schedule = config.optim, config.schedule
    return *optim.betas, optim.weight_decay, optim.clip_norm, schedule.kind, schedule.final_lr


def dropout(config: Any) -> tuple[float, float, float]:
    model = config.model
    return model.embedding_dropout, model.residual_dropout, model.attention_dropout


def tokens_per_step(config: Config) -> int:
    return config.train.rows_per_step * config.model.context


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a row needs no network to be planned")

    monkeypatch.setattr("socket.socket.connect", refused)


def test_all_rows_of_the_tables() -> None:
    """A row that is lost, or that no test reads."""
    rows = {table: len(of(table)) for table in dict.fromkeys(name.split("/")[1] for name in NAMES)}
    assert rows == ROWS


def test_rows_of_a_table_differ() -> None:
    """No override is without an effect, and each row has a run directory of its own."""
    # The defaults of Table 4 are one run, in three sections.
    same = {"s_uv_default", "s_z_default"}
    seen: dict[str, str] = {}
    for table in ROWS:
        for name, config in of(table).items():
            text = table + to_yaml(config).replace(config.run.name, "")
            assert name in same or text not in seen, f"{name} is {seen[text]}"
            seen[text] = name
    assert len({resolved(name[6:]).run.name for name in NAMES}) == len(NAMES)  # two rows never share a directory


# --- parameters

# What the papers print, in millions, and the integers behind it. nGPT truncates, the others round.
NGPT = {"ngpt_0.5b": 468_491_520, "gpt_0.5b": 468_239_360, "ngpt_1b": 1_026_177_280, "gpt_1b": 1_025_731_840}
NGPT_PRINTED = {"ngpt_0.5b": "468.4", "gpt_0.5b": "468.2", "ngpt_1b": "1026.1", "gpt_1b": "1025.7"}
NORMFORMER = {
    "gpt3_125m": (124_377_600, "124.4"),
    "normformer_125m": (124_469_904, "124.5"),
    "gpt3_355m": (354_740_224, "354.7"),
    "normformer_355m": (354_986_368, "355.0"),
    "gpt3_1.3b": (1_313_460_224, "1313.5"),
    "normformer_1.3b": (1_313_952_512, "1314.0"),
    "gpt3_2.7b": (2_648_724_480, "2648.7"),
    "normformer_2.7b": (2_649_544_704, "2649.5"),
}


def published() -> dict[str, int]:
    """The rows whose parameters their paper prints."""
    found = {}
    for row in of("ngpt_runs"):
        size = re.match("n?gpt_[0-9.]+b", row)
        assert size
        found[f"ngpt_runs/{row}"] = NGPT[size[0]]
        assert str(NGPT[size[0]] / 1e6).startswith(NGPT_PRINTED[size[0]])
    for row in of("normformer_table2"):
        arm, size_of_arm = row.split("_")[:2]
        exact, printed = NORMFORMER[f"{arm}_{size_of_arm}"]
        assert f"{exact / 1e6:.1f}" == printed
        # The paper prints the same with ResScale, which adds d_model to each layer.
        extra = {"125m": 12 * 768, "355m": 24 * 1024}[size_of_arm] if row.endswith("res_scale") else 0
        found[f"normformer_table2/{row}"] = exact + extra
    for row in of("tnt_table2"):
        # Of the paper's N-Transformer the authors' code counts all but s_z, and it has no s_qk in its cross-attention.
        found[f"tnt_table2/{row}"] = 333_927_936 if row.startswith("baseline") else 325_244_928 + 32_100 + 6 * 1024
    assert f"{333_927_936 / 1e6:.2f} {325_244_928 / 1e6:.2f}" == "333.93 325.24"
    return found


def formula(model: Any) -> int:
    """Parameters of a model of the papers, whose heads have d / H dimensions and keys and values of their own."""
    if model.n_classes is not None:  # the head tells classes apart, and is no embedding
        outputs = model.n_classes - model.vocab_size * (not model.tied_embeddings)
        vectors = int(hasattr(model, "s_z") or getattr(model, "masked_head", False))  # s_z, or the head's bias
        fewer = outputs * model.d_model + (model.n_classes - model.vocab_size) * vectors
        return formula(replace(model, n_classes=None)) + fewer
    architecture = f"{model.name}+plain_mlp" if getattr(model, "mlp", "gated") == "plain" else model.name
    found = ARCHITECTURES.get(architecture, ARCHITECTURES[model.name]).n_params(model)
    d, vocabulary = model.d_model, model.vocab_size
    if getattr(model, "shared_source", False):  # one embedding for both sides
        found -= vocabulary * d
    if getattr(model, "masked_head", False):  # RoBERTa's: a matrix and its bias, a LayerNorm, a bias of the logits
        found += d * d + d + 2 * d + vocabulary
    return found


@pytest.mark.parametrize("name", [name[6:] for name in NAMES])
def test_parameters(name: str) -> None:
    """By formula, by the built model, and by the paper where it prints a number."""
    model = resolved(name).model
    expected = formula(model)
    assert published().get(name, expected) == expected
    with torch.device("meta"):
        built = build_model(model)
    assert sum(x.numel() for x in built.parameters()) == built.n_params() == expected


# --- the nGPT paper


def test_ngpt_runs() -> None:
    """Tables 2 and 3, A.5 and A.6; the budgets of figures 1, 2 and 8."""
    table = of("ngpt_runs")
    for size, shape in {"0.5b": (24, 1024, 16, 4096), "1b": (36, 1280, 20, 5120)}.items():
        for context in (1, 4, 8):
            for arm in ("ngpt", "gpt"):
                config = table[f"{arm}_{size}_{context}k"]
                model = config.model
                assert (model.n_layers, model.d_model, model.n_heads, model.d_mlp) == shape
                assert (model.context, config.train.batch_rows, config.train.steps) == (1024 * context, 512, 200_000)
    long = [config for row, config in table.items() if row.endswith("_500b")]
    assert [round(config.train.steps * tokens_per_step(config) / 1e9, 3) for config in long] == [500] * 4
    assert table["ngpt_1b_4k_20k"].train.steps == 20_000
    for row, config in table.items():
        assert text_of(config) == ("openwebtext", "Skylion007/openwebtext", "llama2", 32_000)
        decay, warmup = (0, 0) if row.startswith("ngpt") else (0.1, 2000)
        assert optimizer(config) == (0.9, 0.95, decay, 1, "cosine", 0)
        assert (config.schedule.warmup_steps, dropout(config)) == (warmup, NO_DROPOUT)
    slow = table["ngpt_1b_8k_alpha_scale_0.1"].model
    assert (slow.alpha_attn.scale, slow.alpha_mlp.scale) == (0.1, 0.1)
    assert (slow.alpha_attn.init, slow.alpha_mlp.init) == (0.05, 0.05)


def test_ngpt_ablations() -> None:
    """A.8: Table 4 cell by cell, Table 5 column by column."""
    inverse = "1/sqrt(d)"
    default = {"s_qk": (1, inverse), "s_uv": (1, 1), "s_z": (1, inverse)}
    table4 = {
        "s_qk": [(1, inverse), (0.33, inverse), (0.05, inverse), (1, 1), (0.33, 1), (0.05, 1)],
        "s_uv": [(1, 1), (inverse, 1), (1, inverse), (inverse, inverse)],
        "s_z": [(1, inverse), ("sqrt(d)", inverse), (1, 1), ("sqrt(d)", 1)],
    }
    expected = [default | {vector: cell} for vector, cells in table4.items() for cell in cells]
    found = [
        {key: (vector.init, vector.scale) for key, vector in scales(config.model).items() if key in default}
        for config in of("ngpt_table4").values()
    ]
    assert found == expected

    vector, scalar, fixed = "vector", "scalar", "fixed"
    kinds = [tuple(x.kind for x in scales(config.model).values()) for config in of("ngpt_table5").values()]
    assert kinds == [  # s_qk, s_u and s_v, s_z, alphas
        (vector, vector, vector, vector),
        (scalar, vector, vector, vector),
        (vector, scalar, vector, vector),
        (vector, vector, scalar, vector),
        (vector, vector, vector, scalar),
        (scalar, scalar, vector, vector),
        (scalar, scalar, scalar, vector),
        (scalar, scalar, scalar, scalar),
        (fixed, vector, vector, vector),
        (vector, fixed, vector, vector),
        (fixed, fixed, vector, vector),
        (fixed, fixed, scalar, vector),
    ]
    for number in (4, 5, 6):
        for row, config in of(f"ngpt_table{number}").items():
            assert (config.scale.name, config.model.context, config.optim.lr) == ("0.5b", 1024, 1e-3)
            assert config.train.steps * tokens_per_step(config) == 52_428_800_000  # 100k iterations, about 52B tokens
            assert text_of(config) == ("openwebtext", "Skylion007/openwebtext", "llama2", 32_000)
            assert optimizer(config) == (0.9, 0.95, 0, 1, "cosine", 0)
            assert (config.schedule.warmup_steps, dropout(config)) == (0, NO_DROPOUT)
            assert config.model.qk_norm == (row != "no_qk_norm")


def test_ngpt_appendix() -> None:
    """A.2 and A.3 in A.8's setting; figure 14's default, 52 billion tokens at 2e-3, and its other contexts and size."""
    table = of("ngpt_appendix")
    first_two = [(config.model.alpha_sign, config.model.update) for config in table.values()][:2]
    assert first_two == [("free", "lerp"), ("positive", "riemannian")]
    for row, config in table.items():
        assert config.train.steps * tokens_per_step(config) == 52_428_800_000
        assert config.optim.lr == (2e-3 if row.startswith("figure14") else 1e-3)
        assert optimizer(config) == (0.9, 0.95, 0, 1, "cosine", 0)
        assert config.model.context == {"4k": 4096, "8k": 8192}.get(row.split("_")[-1], 1024)
        assert config.scale.name == ("1b" if row.endswith("1b") else "0.5b")


def scales(model: Any) -> dict[str, Any]:
    """The columns of Table 5; both vectors of a column are the same."""
    assert (model.s_u, model.alpha_attn) == (model.s_v, model.alpha_mlp)
    return {"s_qk": model.s_qk, "s_uv": model.s_u, "s_z": model.s_z, "alpha": model.alpha_attn}


# --- the NormFormer paper

NORMFORMER_TEXT = ("openwebtext", "Skylion007/openwebtext", "gpt2", 51_200)
# train_lm.sh: betas, weight decay, no clipping, a linear decay to 0.
NORMFORMER_OPTIMIZER = (0.9, 0.98, 0.01, None, "linear", 0)


def operations(config: Any) -> tuple[bool, bool, bool, bool]:
    """Post-attention LN, FFN LN, HeadScale, ResScale."""
    model = config.model
    return model.post_attn_norm, model.ffn_norm, model.head_scale == "before", model.res_scale


def check_gpt3(config: Any) -> None:
    """What Tables 1 and 2 share: GPT-3's rows and batches, its 375 million tokens of warm-up, the script's dropout."""
    large = config.model.d_model >= 2048
    assert (text_of(config), optimizer(config)) == (NORMFORMER_TEXT, NORMFORMER_OPTIMIZER)
    assert (config.model.context, tokens_per_step(config)) == (2048, 2**20 if large else 2**19)
    assert config.schedule.warmup_steps == (358 if large else 716)  # of 375,000,000 tokens, rounded up
    assert dropout(config) == (NO_DROPOUT if config.model.n_layers == 24 and not large else DROPOUT)


def test_normformer_table_1() -> None:
    """The paper's rates of both arms, GPT-3's batch and warm-up; the baselines have none of the operations."""
    table = of("normformer_table1")
    for size, (gpt3, tuned) in {"125m": (6e-4, 3e-3), "355m": (3e-4, 1e-3), "1.3b": (2e-4, 6e-4)}.items():
        for arm, value in {"gpt3": gpt3, "baseline": tuned, "normformer": tuned}.items():
            config = table[f"{arm}_{size}"]
            check_gpt3(config)
            assert (config.optim.lr, config.train.steps) == (value, 50_000)
            assert operations(config) == ((True, True, True, False) if arm == "normformer" else (False,) * 4)


def test_normformer_table_2() -> None:
    """Learning rate, steps in thousands, ReLU squared, ResScale, NormFormer; in the order of the table."""
    rows = list(of("normformer_table2").values())
    for config in rows:
        check_gpt3(config)
    assert [
        (
            config.optim.lr,
            config.train.steps // 1000,
            config.model.activation == "relu2",
            operations(config)[3],
            operations(config)[:3] == (True, True, True),
        )
        for config in rows
    ] == [
        (6e-4, 572, False, False, False),
        (3e-3, 572, False, False, False),
        (3e-3, 540, False, False, True),
        (3e-3, 539, False, True, True),
        (3e-4, 572, False, False, False),
        (1e-3, 572, False, False, False),
        (1e-3, 552, False, False, True),
        (1e-3, 550, False, True, True),
        (2e-4, 286, False, False, False),
        (6e-4, 286, False, False, False),
        (6e-4, 275, False, False, True),
        (1.6e-4, 286, False, False, False),
        (6e-4, 277, True, False, True),
        (1.6e-4, 230, True, False, False),
        (6e-4, 230, True, False, False),
        (6e-4, 222, True, False, True),
    ]


def test_normformer_table_3() -> None:
    """Section 4 of the paper: Pre-LN RoBERTa-base, 2 and 1.92 million batches of a million tokens. RoBERTa's public
    commands for that batch: rate, warm-up, betas, eps, decay, dropout. Its masks are BERT's."""
    table = of("normformer_table3")
    for row, config in table.items():
        model = config.model
        assert (model.n_layers, model.d_model, model.n_heads, model.d_mlp, model.context) == (12, 768, 12, 3072, 512)
        assert (model.norm, model.positions, model.masked_head, model.bidirectional) == ("layer", "learned", True, True)
        assert (model.mask_share, config.data.mask_keep, config.data.mask_random) == (0.15, 0.1, 0.1)
        assert (tokens_per_step(config), config.schedule.warmup_steps) == (2**20, 10_000)
        assert config.train.steps == (2_000_000 if row == "baseline" else 1_920_000)
        assert (config.optim.lr, config.optim.eps, optimizer(config)) == (5e-4, 1e-6, NORMFORMER_OPTIMIZER)
        assert (dropout(config), text_of(config)) == (DROPOUT, (*NORMFORMER_TEXT[:3], 50_265))
        more = model.placement_of("attn"), model.placement_of("mlp"), model.ffn_norm, model.head_scale, model.res_scale
        res_scale = "mlp" if row.endswith("res_scale") else "none"
        ours = ("peri", "pre", "norm", "before", res_scale)
        assert more == (("pre", "pre", "none", "none", "none") if row == "baseline" else ours)


def test_normformer_table_3_glue() -> None:
    """Table 3's models; RoBERTa's steps, batches, warm-up, decay and linear schedule (fairseq's README for GLUE)."""
    pretrained = of("normformer_table3")
    steps = {"cola": (5336, 320), "rte": (2036, 122), "mrpc": (2296, 137), "sst2": (20_935, 1256)}
    steps |= {"mnli": (123_873, 7432), "qnli": (33_112, 1986), "qqp": (113_272, 28_318)}
    for row, config in of("normformer_table3_glue").items():
        arm, task = row.rsplit("_", 1)
        assert config.data.task == task
        assert (config.train.steps, config.schedule.warmup_steps) == steps[task]
        assert config.train.rows_per_step == (16 if task in ("cola", "rte", "mrpc") else 32)
        assert (config.optim.eps, optimizer(config)) == (1e-6, (0.9, 0.98, 0.1, None, "linear", 0))
        assert (config.model.objective, dropout(config)) == ("label", DROPOUT)
        ours, theirs = (vars(of_row.model) for of_row in (config, pretrained[arm]))
        assert {name for name in ours if ours[name] != theirs[name]} == {"n_classes"}


def test_normformer_text() -> None:
    """Figure 2 and sections 4, 5 and 6.1: rates of Table 1, steps of Table 2, the operations that the text names."""
    table = of("normformer_text")
    operations_of = {"normformer": (True,) * 4, "gpt3": (False,) * 4, "res": (False, False, False, True)}
    for row, config in table.items():
        model = config.model
        check_gpt3(config)
        assert config.optim.lr == {768: 3e-3, 780: 3e-3, 1024: 1e-3}.get(model.d_model, 6e-4)
        normal = 572 if model.d_model < 2048 else 286
        steps = {"normformer_1.3b": 275, "normformer_125m": 539}
        assert config.train.steps == 1000 * steps.get("_".join(row.split("_")[:2]), normal)
        if not row.endswith("both"):
            assert (operations(config), model.activation) == (operations_of[row.split("_")[0]], "gelu")
        else:
            parts = model.attn_norm_placement, model.mlp_norm_placement, model.ffn_norm, model.head_scale
            assert (*parts, model.res_scale) == ("peri", "pre", "norm", "before", "both")
    control = table["gpt3_125m_780"].model
    assert (control.d_model, control.d_mlp, control.n_heads) == (780, 3120, 12)
    assert formula(control) // 10**6 == 127


def test_normformer_tables_4_and_5() -> None:
    """With Table 7's hyperparameters, where a row of Table 5 does not change one."""
    table4, table5 = of("normformer_table4"), of("normformer_table5")
    everything, nothing = (True, True, True, True), (False,) * 4
    # Post-attention LN, FFN LN, HeadScale, ResScale, LN of q, k and v.
    assert [(*operations(config), config.model.qkv_norm) for config in table4.values()] == [
        (*everything, False),
        (False, True, True, True, False),
        (True, False, True, True, False),
        (True, True, False, True, False),
        (True, True, True, False, False),
        (*everything, True),
        (*nothing, False),
    ]
    assert [config.train.steps for config in table4.values()] == [92_500] * 5 + [87_500, 100_000]

    pairs = {"lr_0.001": 1e-3, "lr_0.003": 3e-3, "lr_0.006": 6e-3}
    pairs |= dict.fromkeys(["longer_warmup", "gpt3", "clip_0.1"], 3e-3)
    assert list(table5) == [f"{arm}_{pair}" for pair in pairs for arm in ("baseline", "normformer")]
    for row, config in table5.items():
        arm, pair = row.split("_", 1)
        assert (operations(config), config.optim.lr) == (everything if arm == "normformer" else nothing, pairs[pair])
        budget = 1000 / 470 if pair == "gpt3" else 1
        assert config.train.steps == round(budget * (92_500 if arm == "normformer" else 100_000))
    for row, config in {**table4, **table5}.items():
        model, gpt3 = config.model, row.endswith("_gpt3")
        assert (model.n_layers, model.d_model, model.d_mlp, model.activation) == (12, 768, 3072, "gelu")
        assert (model.context, tokens_per_step(config)) == (2048 if gpt3 else 1024, 524_288)
        assert (text_of(config), dropout(config)) == (NORMFORMER_TEXT, DROPOUT if gpt3 else NO_DROPOUT)
        clip = 0.1 if row.endswith("clip_0.1") else None
        assert optimizer(config) == (0.9, 0.98, 0.01, clip, "linear", 0)
        assert config.schedule.warmup_steps == (6000 if row.endswith("longer_warmup") else 500)
    assert all(config.optim.lr == 3e-3 for config in table4.values())


def test_normformer_table_6() -> None:
    """fairseq's transformer_lm_wiki103 and its command, but for what the table's comment leaves out."""
    table = of("normformer_table6")
    for row, config in table.items():
        model = config.model
        assert text_of(config) == ("hf", "Salesforce/wikitext", "words", 267_735)
        assert (model.n_layers, model.d_model, model.n_heads, model.d_mlp) == (16, 1024, 8, 4096)
        assert (model.context, tokens_per_step(config), config.train.steps) == (3072, 8 * 3 * 3072, 280_000)
        assert (dropout(config), config.optim.clip_norm, config.schedule.warmup_steps) == ((0.3, 0.3, 0.1), 0.1, 16_000)
        ours = (model.attn_norm_placement == "peri", model.ffn_norm == "norm", model.head_scale == "before")
        assert ours == (row == "normformer",) * 3


COGVIEW, DEEP, LAYER_SCALE = "CogView", "DeepInit", "LayerScale"
# Table 8: arch., scale FC, scale attn, lambda, scale heads, LN variant.
TABLE_8 = {
    0: (None, 1, 1, 0, 1, "PowerNorm"),
    2: (None, 0, 0, 1, 0, None),
    3: (DEEP, 0, 0, 0, 0, None),
    4: (DEEP, 1, 1, 1, 1, None),
    5: (None, 1, 1, 0, 1, "FFNGeglu"),
    6: (None, 0, 1, 0, 0, None),
    7: (LAYER_SCALE, 0, 0, 1, 0, None),
    8: (None, 1, 1, 1, 1, None),
    9: (None, 0, 1, 0, 1, None),
    10: (COGVIEW, 1, 0, 0, 0, COGVIEW),
    11: (None, 0, 0, 0, 1, None),
    12: (None, 1, 0, 0, 0, "T5"),
    13: (None, 1, 0, 0, 0, "FFNGeglu"),
    14: (None, 0, 0, 0, 0, None),
    15: (None, 1, 0, 0, 0, "No Bias or gain"),
    16: (None, 1, 0, 0, 0, "No Bias"),
    17: (None, 1, 0, 0, 0, "No gain"),
    18: (None, 1, 0, 0, 1, None),
    19: (COGVIEW, 1, 1, 0, 1, COGVIEW),
    20: (None, 1, 0, 0, 0, COGVIEW),
    21: (COGVIEW, 1, 1, 0, 0, COGVIEW),
    22: (None, 1, 0, 0, 0, None),
    23: (None, 1, 0, 0, 0, "PowerNorm"),
    24: (LAYER_SCALE, 1, 1, 1, 1, None),
    25: (None, 1, 1, 0, 1, "No gain"),
    26: (None, 1, 1, 0, 1, COGVIEW),
    27: (None, 1, 1, 0, 1, "No Bias or gain"),
    28: (None, 1, 1, 0, 1, "No Bias"),
    29: (None, 1, 1, 0, 1, "T5"),
    30: (None, 1, 1, 0, 0, None),
    31: (None, 1, 1, 0, 1, None),
}
VARIANTS = {
    None: "layer",
    "FFNGeglu": "layer",
    "T5": "rms",
    "PowerNorm": "pn",
    COGVIEW: "cogview",
    "No Bias": "layer_no_bias",
    "No gain": "layer_no_gain",
    "No Bias or gain": "layer_plain",
}


def test_normformer_table_8() -> None:
    """Each tick of the paper's columns, one by one."""
    table = of("normformer_table8")
    assert list(table) == [f"r{number}" for number in TABLE_8]
    for number, (arch, fc, attn, res, heads, variant) in TABLE_8.items():
        config = table[f"r{number}"]
        model = config.model
        assert model.norm == VARIANTS[variant]
        assert model.ffn_norm == (("gain" if variant == "FFNGeglu" else "norm") if fc else "none")
        assert (model.attn_norm_placement == "peri", model.head_scale == "before") == (attn, heads)
        assert (model.res_scale == "mlp", model.layer_scale == 1e-5) == (res, arch == LAYER_SCALE)
        assert (model.mlp_norm_placement == "peri", model.embedding_gradient == 0.1) == ((arch == COGVIEW),) * 2
        assert (model.deep_init, model.norm_placement) == (arch == DEEP, "pre")
        assert (model.n_layers, model.d_model, model.d_mlp, model.context) == (24, 2048, 8192, 512)
        assert text_of(config) == NORMFORMER_TEXT
        assert optimizer(config) == (0.9, 0.98, 0.01, None, "ramp", 0)
        assert (config.optim.lr, config.train.steps) == (0.1, 1000)  # from 0 to 0.1 in 1,000 steps


def test_normformer_figures() -> None:
    """Figure 3's three arms; figure 5's ramp of 5e-5 a step."""
    for row, config in of("normformer_figure3").items():
        model = config.model
        assert (model.norm_placement == "post") == (row == "post_ln")
        assert (model.attn_norm_placement == "peri") == (row == "normformer")
        assert (text_of(config), optimizer(config)) == (NORMFORMER_TEXT, NORMFORMER_OPTIMIZER)
        assert (config.optim.lr, config.train.steps, config.schedule.warmup_steps) == (3e-3, 100_000, 500)
        assert (model.context, tokens_per_step(config), dropout(config)) == (1024, 524_288, NO_DROPOUT)
    for row, config in of("normformer_figure5").items():
        ours = not row.startswith("baseline")
        assert operations(config) == (ours, ours, ours, "res_scale" in row)
        assert config.optim.lr / config.train.steps == pytest.approx(5e-5)
        assert (text_of(config), optimizer(config)) == (NORMFORMER_TEXT, (0.9, 0.98, 0.01, None, "ramp", 0))
        assert dropout(config) == (NO_DROPOUT if row.endswith("355m") else DROPOUT)


# --- the PowerNorm and TnT papers


def test_powernorm_table_2() -> None:
    """A.2, and Ma et al.'s scripts; all else is equal but the norm and its decay rates."""
    sizes = {
        "ptb": (3, 32, 120, 7_263, ("hf", "ptb-text-only/ptb_text_only", "words", 10_000), 929_589),
        "wikitext103": (6, 80, 60, 645_169, ("hf", "Salesforce/wikitext", "words", 267_735), 103_227_021),
    }
    table = of("powernorm_table2")
    common: dict[str, Any] = {}
    for row, config in table.items():
        text, norm, *alphas = re.match("(ptb|wikitext103)_(pn_v|[a-z]+)(?:_([0-9.]+)_([0-9.]+))?$", row).groups()  # type: ignore[union-attr]
        n_layers, context, batch, steps, expected_text, words = sizes[text]
        model = config.model
        assert (model.n_layers, model.d_model, model.d_mlp, model.context) == (n_layers, 256, 2100, context)
        assert (model.mlp, model.activation, model.tied_embeddings) == ("plain", "relu", True)
        assert (config.train.rows_per_step, config.train.steps, text_of(config)) == (batch, steps, expected_text)
        assert steps - 1 < 30 * words / (batch * context) <= steps  # 30 epochs
        files = {"ptb": "penn_treebank/train/*", "wikitext103": "wikitext-103-v1/train-*"}[text]
        assert (config.data.files, config.data.val_files) == (files, files.replace("train", "validation"))
        # WikiText's empty lines are ends of lines too; the words are counted in prepared text.
        assert (config.data.keep_empty, config.data.streaming) == (text == "wikitext103", False)
        assert is_commit(config.data.revision)
        assert optimizer(config) == (0.9, 0.999, 0, 0.25, "cosine", 0)
        assert (config.optim.lr, config.schedule.warmup_steps, config.optim.label_smoothing) == (2.5e-4, 4000, 0.1)
        assert dropout(config) == (0.3, 0.3, 0)
        assert (model.norm, model.group_scaling) == (norm, 1)  # layer-scale
        assert model.psi_warmup_steps == (4000 if norm == "pn" else 0)
        assert (model.alpha_fwd, model.alpha_bkw) == tuple(float(alpha or 0.9) for alpha in alphas)
        tree = to_dict(config)
        for name in ("norm", "group_scaling", "psi_warmup_steps", "alpha_fwd", "alpha_bkw"):
            del tree["model"][name]
        del tree["run"]["name"], tree["logging"]["wandb"]  # its name and group are the row's
        assert common.setdefault(text, tree) == tree
    tried = {(c.model.alpha_fwd, c.model.alpha_bkw) for row, c in table.items() if row.startswith("ptb_pn")}
    assert tried == {(forward, back) for forward in (0.9, 0.95, 0.99) for back in (0.9, 0.95, 0.99)}


def test_powernorm_table_1() -> None:
    """A.1 and the authors' scripts train-iwslt14.sh and train-wmt-big.sh; all else is equal but the norm."""
    common: dict[str, Any] = {}
    for row, config in of("powernorm_table1").items():
        text, norm, batch = re.match(r"([a-z0-9]+)_([a-z_]+?)(?:_(\d+))?$", row).groups()  # type: ignore[union-attr]
        small, model = text == "iwslt14", config.model
        sizes = (6, 512, 4, 1024) if small else (6, 1024, 16, 4096)
        assert (model.n_layers, model.d_model, model.n_heads, model.d_mlp) == sizes
        assert (model.n_encoder_layers, model.norm_placement) == (6, "pre")
        assert (model.mlp, model.activation) == ("plain", "relu")
        assert (model.norm, model.decoder_norm) == (norm, "layer")
        assert model.group_scaling == (0 if norm == "layer" else model.n_heads)
        assert model.psi_warmup_steps == (8000 if norm == "pn" else 0)
        synchronised = not small and norm in ("pn_v", "batch")
        assert model.statistics == ("synchronised" if synchronised else "per_rank")
        assert (*dropout(config), model.activation_dropout) == (0.3, 0.3, 0.1, 0.1)
        files = ("iwslt14.tokenized.de-en" if small else "wmt14_en_de", ("de", "en") if small else ("en", "de"))
        data = config.data
        assert (data.path, data.val_files) == (f"{files[0]}/train", f"{files[0]}/valid")
        assert (data.text_field, data.translation_field) == files[1]
        assert (config.tokenizer.kind, model.vocab_size) == ("words", 10_200 if small else 37_000)
        # 4,096 tokens of the longer sides on one GPU, and on 32; statistics of fewer in figure 5 (section 5.3).
        sizes = (2 * 4096, 100_000) if small else (2 * 32 * 4096, 300_000)
        assert (tokens_per_step(config), config.train.steps) == sizes
        assert config.train.micro_rows * model.context == 2 * int(batch or 4096)
        assert optimizer(config) == (0.9, 0.98, 1e-4 if small else 0, None, "inverse_sqrt", 0)
        assert (config.optim.name, config.optim.lr) == ("adamw", 1.5e-3 if small else 3e-3)
        assert (config.schedule.warmup_steps, config.optim.label_smoothing) == (8000, 0.1)
        tree = to_dict(config)
        for name in ("norm", "group_scaling", "psi_warmup_steps", "statistics"):
            del tree["model"][name]
        del tree["run"]["name"], tree["logging"]["wandb"], tree["train"]["micro_rows"]
        assert common.setdefault(text, tree) == tree


def test_tnt_table_4() -> None:
    """Section 3: 100 iterations, batch 64, and which examples validate; the models of Table 2."""
    pretrained = of("tnt_table2")
    reserved = {"qnli": 104_743, "qqp": 363_846, "mnli": 392_702, "sst2": 67_349}  # training examples
    for row, config in of("tnt_table4").items():
        arm, task = row.rsplit("_", 1)
        assert (config.data.task, config.train.steps, config.train.rows_per_step) == (task, 100, 64)
        if task in reserved:
            assert (config.data.val_files, round(config.data.val_fraction * reserved[task], -1)) == (None, 1000)
        else:
            assert (config.data.val_files is not None, config.data.val_range) == (True, [0, 0.5])
        ours, theirs = (vars(of_row.model) for of_row in (config, pretrained[arm]))
        differ = {name for name in ours if ours[name] != theirs[name]}
        assert differ <= {"n_classes", "embedding_dropout", "residual_dropout", "attention_dropout"}


def test_tnt_table_2() -> None:
    """Tables 2 and 5; batch, schedule and clipping of the authors' code."""
    for row, config in of("tnt_table2").items():
        baseline, model = row.startswith("baseline"), config.model
        assert text_of(config) == ("openwebtext", "Skylion007/openwebtext", "t5", 32_100)
        assert config.data.files == "plain_text/train-000[0-3]*"  # 40 files of 80: the first 4 million documents
        assert (model.n_layers, model.n_encoder_layers, model.n_heads) == (6, 6, 8)
        assert (model.d_model, model.d_mlp) == ((1152, 4608) if baseline else (1024, 4096))
        assert model.activation == ("gelu" if row.endswith("gelu") else "silu")
        block = 512 if row.endswith("512") else 1024
        assert (model.source_context, model.context) == (block, 3 * block // 2)
        assert (config.train.rows_per_step, config.train.steps, config.optim.lr) == (16 * 64, 2000, 1.5e-3)
        assert optimizer(config) == (0.9, 0.95, 0.1 if baseline else 0, 1, "constant", 0)
        assert config.schedule.warmup_steps == (100 if baseline else 0)
        assert dropout(config) == (DROPOUT if baseline else (0.1, 0, 0))
        assert getattr(model, "mlp", "gated") == ("plain" if baseline else "gated")


def test_text_of_ones_own_keeps_the_tokenizer() -> None:
    """It decides the parameters; data=local alone trains a model of 4,096 pieces."""
    last_of_table = {name.split("/")[1]: name.removeprefix("paper/") for name in NAMES}
    for row in [*last_of_table.values(), "powernorm_table2/ptb_pn"]:
        own = load_config([f"experiment=paper/{row}", "data=local", "data.path=corpus", "data.files=null"]).tokenizer
        typed = resolved(row).tokenizer
        assert (own.kind, own.vocab_size) == (typed.kind, typed.vocab_size), row


def test_engpt() -> None:
    """Its config.yaml, engpt.py and attend.py."""
    for row, config in of("engpt").items():
        model = config.model
        assert (model.n_layers, model.n_heads, model.d_model, model.d_mlp, model.context) == (6, 8, 256, 1024, 512)
        assert text_of(config) == ("openwebtext", "Skylion007/openwebtext", "bytes", 257)
        assert (config.optim.lr, config.train.rows_per_step, config.schedule.warmup_steps) == (3e-3, 256, 6817)
        assert (optimizer(config), dropout(config)) == ((0.9, 0.95, 0, 0.72, "cosine", 0), NO_DROPOUT)
        assert (model.rope_base, model.update_attn) == (1e6, "lerp")
        assert (model.norm_eps == 1e-5) == (row != "no_norm_eps")
        assert (model.constraint == "parametrization") == (row != "projection")
        slerp = (model.update_mlp, model.alpha_mlp.kind, model.alpha_mlp.init)
        assert slerp == (("lerp", "vector", 0.05) if row == "lerp_mlp" else ("slerp", "fixed", 0.5))
        shared = (model.s_qk.shared, model.s_qk.scale)
        assert shared == ((False, "1/sqrt(d)") if row == "s_qk_per_head" else (True, pytest.approx(32**-0.5)))
        assert config.train.precision == ("bf16" if row == "bf16" else "fp16")


# --- as commands, and the page


@pytest.mark.parametrize(
    ("row", "parameters", "tokens", "vocabulary"),
    [
        ("ngpt_runs/ngpt_0.5b_1k", "468,491,520", "104,857,600,000", "32,000"),
        ("powernorm_table2/wikitext103_pn", "76,591,160", "3,096,811,200", "267,735"),
    ],
)
def test_plan_as_typed(
    row: str, parameters: str, tokens: str, vocabulary: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With nothing forced: parameters, tokens and vocabulary are the paper's."""
    assert main(["plan", f"experiment=paper/{row}", f"plan.out={tmp_path / 'plan.json'}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"vocabulary {vocabulary},", printed)
    assert re.search(rf"total +{parameters}\n", printed)
    assert re.search(rf"tokens in all +{tokens} ", printed)
    assert json.loads((tmp_path / "plan.json").read_text())["parameters"]["total"] == int(parameters.replace(",", ""))


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network: the hub's address refuses connections at once."""
    monkeypatch.undo()
    known_to("http://127.0.0.1:9", tmp_path, monkeypatch)


@pytest.mark.parametrize("row", ["ngpt_runs/ngpt_0.5b_1k", "powernorm_table2/ptb_pn"])
def test_training_without_a_network_ends(
    row: str, closed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a message, and not on another text."""
    given = [f"run.root={tmp_path}", f"data.cache={tmp_path}", "data.fetch_minutes=0.01", "train.device=cpu"]
    assert main(["train", f"experiment=paper/{row}", *given, "logging.wandb.mode=disabled"]) == 3
    said = capsys.readouterr().err
    assert resolved(row).data.repo in said
    assert re.search(r"no connection to http://127\.0\.0\.1:9.*; given up.*data=local", said)
    assert not list(tmp_path.rglob("metrics.jsonl"))
