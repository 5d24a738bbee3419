"""Experiments by name: the tables of the papers and their rows, what overrides what, and the messages.

The parameter counts are written in tests/reference a second time, from the papers, without the models.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ngpt_train.__main__ import main
from ngpt_train.config import Config, ConfigError, list_experiments, load_config, to_dict, to_yaml
from ngpt_train.models import build_model
from tests.properties.architectures import ARCHITECTURES

NAMES = list_experiments()
# LLaMA-2's vocabulary, where the experiment leaves it to the tokenizer.
VOCABULARY = 32_000


@cache
def resolved(name: str) -> Config:
    config = load_config([f"experiment={name}"])
    if config.model.vocab_size == "auto":
        config.model.vocab_size = VOCABULARY
    return config


def formula(model: Any) -> int:
    """Parameters of a model of the papers, whose heads have d / H dimensions and keys and values of their own."""
    return ARCHITECTURES[model.name].n_params(model)


# The integers behind the millions that the papers print (architectures.md 1.2 and 2).
PUBLISHED = {
    "paper/ngpt_runs/ngpt_0.5b_1k": 468_491_520,
    "paper/ngpt_runs/gpt_0.5b_8k": 468_239_360,
    "paper/ngpt_runs/ngpt_1b_8k_alpha_scale_0.1": 1_026_177_280,
    "paper/ngpt_runs/gpt_1b_4k": 1_025_731_840,
    "paper/normformer_table2/gpt3_125m_high_lr": 124_377_600,
    "paper/normformer_table2/normformer_125m": 124_469_904,
    "paper/normformer_table2/gpt3_355m_high_lr": 354_740_224,
    "paper/normformer_table2/normformer_355m": 354_986_368,
    "paper/normformer_table2/gpt3_1.3b_high_lr": 1_313_460_224,
    "paper/normformer_table2/normformer_1.3b": 1_313_952_512,
    "paper/normformer_table2/gpt3_2.7b_replicated": 2_648_724_480,
    "paper/normformer_table2/normformer_2.7b": 2_649_544_704,
    "paper/tnt_table2/n_transformer": 325_283_172,
}


@pytest.mark.parametrize("name", NAMES)
def test_resolves_and_has_the_parameters_of_its_formula(name: str) -> None:
    config = resolved(name)
    expected = PUBLISHED.get(name, formula(config.model))
    assert formula(config.model) == expected
    with torch.device("meta"):
        model = build_model(config.model)
    assert sum(x.numel() for x in model.parameters()) == expected
    assert model.n_params() == expected


def test_all_rows_of_the_tables() -> None:
    rows: dict[str, int] = {}
    for name in NAMES:
        rows[name.rpartition("/")[0]] = rows.get(name.rpartition("/")[0], 0) + 1
    assert len(set(NAMES)) == len(NAMES)
    assert set(PUBLISHED) <= set(NAMES)
    assert rows == {
        "": 1,
        "paper/ngpt_runs": 13,  # two arms of six, and A.6
        "paper/ngpt_table4": 14,
        "paper/ngpt_table5": 12,
        "paper/ngpt_table6": 2,
        "paper/normformer_table1": 9,
        "paper/normformer_table2": 16,
        "paper/normformer_table4": 7,
        "paper/powernorm": 4,
        "paper/tnt_table2": 6,
    }


def test_rows_of_a_table_differ() -> None:
    # The defaults of Table 4 are one run, in three sections.
    same = {"s_uv_default", "s_z_default"}
    seen: dict[str, str] = {}
    for name in NAMES:
        table, _, row = name.rpartition("/")
        if row in same:
            continue
        text = table + to_yaml(resolved(name)).replace(resolved(name).run.name, "")
        assert text not in seen, f"{name} is {seen[text]}"
        seen[text] = name
    assert len({resolved(name).run.name for name in NAMES}) == len(NAMES)  # two rows never share a directory


def test_ngpt_runs() -> None:
    """Tables 2 and 3, A.5 and A.6 of the nGPT paper."""
    for size, shape in {"0.5b": (24, 1024, 16, 4096), "1b": (36, 1280, 20, 5120)}.items():
        for context in (1, 4, 8):
            ngpt, gpt = (resolved(f"paper/ngpt_runs/{arm}_{size}_{context}k") for arm in ("ngpt", "gpt"))
            for config in (ngpt, gpt):
                model = config.model
                assert (model.n_layers, model.d_model, model.n_heads, model.d_mlp) == shape
                assert (model.context, config.train.batch_rows, config.train.steps) == (1024 * context, 512, 200_000)
                assert (config.schedule.kind, config.schedule.final_lr) == ("cosine", 0)
            assert (ngpt.model.name, ngpt.optim.weight_decay, ngpt.schedule.warmup_steps) == ("ngpt", 0, 0)
            assert (gpt.model.name, gpt.optim.weight_decay, gpt.schedule.warmup_steps) == ("gpt", 0.1, 2000)
    slow = resolved("paper/ngpt_runs/ngpt_1b_8k_alpha_scale_0.1").model
    assert (slow.alpha_attn.scale, slow.alpha_mlp.scale) == (0.1, 0.1)  # type: ignore[attr-defined]
    assert (slow.alpha_attn.init, slow.alpha_mlp.init) == (0.05, 0.05)  # type: ignore[attr-defined]


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
    found = []
    for name in (name for name in NAMES if name.startswith("paper/ngpt_table4/")):
        model: Any = resolved(name).model
        assert model.s_u == model.s_v
        found.append({key: (vector.init, vector.scale) for key, vector in scales(model).items() if key in default})
    assert found == expected

    vector, scalar, fixed = "vector", "scalar", "fixed"
    assert [
        tuple(vector.kind for vector in scales(resolved(name).model).values())
        for name in NAMES
        if name.startswith("paper/ngpt_table5/")
    ] == [  # s_qk, s_u and s_v, s_z, alphas
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
    for name in NAMES:
        if name.startswith("paper/ngpt_table"):
            config = resolved(name)
            assert (config.scale.name, config.model.context, config.optim.lr) == ("0.5b", 1024, 1e-3)
            assert config.train.steps * config.train.rows_per_step * config.model.context == 52_428_800_000
            assert config.model.qk_norm == (name != "paper/ngpt_table6/no_qk_norm")  # type: ignore[attr-defined]


def scales(model: Any) -> dict[str, Any]:
    """The columns of Table 5; both vectors of a column are the same."""
    assert (model.s_u, model.alpha_attn) == (model.s_v, model.alpha_mlp)
    return {"s_qk": model.s_qk, "s_uv": model.s_u, "s_z": model.s_z, "alpha": model.alpha_attn}


def test_normformer_tables() -> None:
    """Tables 1, 2, 4 and 7 of the NormFormer paper."""
    lr = {"125m": (6e-4, 3e-3), "355m": (3e-4, 1e-3), "1.3b": (2e-4, 6e-4)}
    for size, (gpt3, tuned) in lr.items():
        for arm, value in {"gpt3": gpt3, "baseline": tuned, "normformer": tuned}.items():
            config = resolved(f"paper/normformer_table1/{arm}_{size}")
            assert (config.optim.lr, config.model.context) == (value, 2048)
            assert config.train.batch_tokens == (2**20 if size == "1.3b" else 2**19)
            assert operations(config) == ((True, True, True, False) if arm == "normformer" else (False,) * 4)

    # Learning rate, steps in thousands, ReLU squared, ResScale, NormFormer; in the order of the table.
    rows = [resolved(name) for name in NAMES if name.startswith("paper/normformer_table2/")]
    assert (
        [
            (
                config.optim.lr,
                config.train.steps // 1000,
                config.model.activation == "relu2",  # type: ignore[attr-defined]
                operations(config)[3],
                operations(config)[:3] == (True, True, True),
            )
            for config in rows
        ]
        == [
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
    )

    # Post-attention LN, FFN LN, HeadScale, ResScale, LN of q, k and v.
    rows = [resolved(name) for name in NAMES if name.startswith("paper/normformer_table4/")]
    assert [(*operations(config), config.model.qkv_norm) for config in rows] == [  # type: ignore[attr-defined]
        (True, True, True, True, False),
        (False, True, True, True, False),
        (True, False, True, True, False),
        (True, True, False, True, False),
        (True, True, True, False, False),
        (True, True, True, True, True),
        (False, False, False, False, False),
    ]
    assert [config.train.steps for config in rows] == [92_500] * 5 + [87_500, 100_000]
    for config in rows:
        assert (config.optim.lr, config.schedule.kind, config.schedule.warmup_steps) == (3e-3, "linear", 500)
        assert (config.model.context, config.train.batch_tokens, config.scale.name) == (1024, 524_288, "125m")


def operations(config: Config) -> tuple[bool, bool, bool, bool]:
    model: Any = config.model
    return model.post_attn_norm, model.ffn_norm, model.head_scale == "before", model.res_scale


def test_powernorm_differs_in_the_norm_alone() -> None:
    norms = ["pn", "pn_v", "batch", "layer"]
    configs: list[Any] = [resolved(f"paper/powernorm/{norm}") for norm in norms]
    assert [config.model.norm for config in configs] == norms
    own = {config.model.norm: (config.model.psi_warmup_steps, config.model.group_scaling) for config in configs}
    assert own == {"pn": (2000, 12), "pn_v": (0, 12), "batch": (0, 12), "layer": (0, 0)}  # what each of them uses
    common = []
    for config in configs:
        tree = to_dict(config)
        for name in ("norm", "psi_warmup_steps", "group_scaling"):
            del tree["model"][name]
        del tree["run"]["name"], tree["logging"]["wandb"]  # its name and group are the row's
        common.append(tree)
    assert common[1:] == 3 * common[:1]


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


# The rows of a table (or its whole content), the row that is chosen, and what the message must say.
MISTAKES: list[tuple[str, str, list[str]]] = [
    ("a: {}", "/b", ["experiment=t/b: t has no b", "t has a"]),
    ("s_qk_1: {}\n  s_u: {}", "/s_qk1", ["experiment=t/s_qk1", "did you mean s_qk_1?", "s_qk_1, s_u"]),
    ("a: {}\n  b: {}", "", ["experiment=t: several", "experiment=t/a", "t has a, b"]),
    ("a: {}", "/a,t/b", ["one option", "-m experiment=a,b"]),
    ("a: {train.step: 3}", "/a", ["train.step=3", "train.steps", "in FILE, row a"]),
    ("a: {modle: gpt}", "/a", ["modle=gpt", "did you mean model", "in FILE, row a"]),
    ("a: {model: gtp}", "/a", ["model=gtp", "did you mean gpt", "in FILE, row a"]),
    ("a: {model: null}", "/a", ["model=null: no such option", "in FILE, row a"]),
    ("a: {train.steps: ten}", "/a", ["train.steps=ten", "an integer >= 1", "in FILE, row a"]),
    ("a: {train.steps: '5'}", "/a", ["train.steps=5", "without quotes", "in FILE, row a"]),
    ("a: {model: gpt, model.s_qk.init: 1}", "/a", ["model.s_qk.init=1: no such key", "in FILE, row a"]),
    ("a: {model: {s_qk: {init: 2}}}", "/a", ["Write model.s_qk.init: 2", "in FILE, row a"]),
    ("a: {model.s_qk: {init: 2, kind: fixed}}", "/a", ["Write model.s_qk.init: 2, model.s_qk.kind: fixed", "row a"]),
    ("a: {train: 5}", "/a", ["train is a section", "in FILE, row a"]),
    ("a: {optim.lr_table: {tiny: {256: 1}}}", "/a", ["Set optim.lr", "in FILE, row a"]),
    ("a: {experiment: quickstart}", "/a", ["experiment=quickstart", "in FILE, row a"]),
    ("a: {run.root: '${nope}'}", "/a", ["run.root=${nope}", "'nope' not found", "in FILE, row a"]),
    ("a: {schedule.warmup_steps: 500, train.steps: 3}", "/a", ["warmup", "train.steps is set in FILE, row a"]),
    ("a: {train.batch_rows: 8, train.batch_tokens: 2048}", "/a", ["both set the batch size", "in FILE, row a"]),
    ("a: 5", "/a", ["5: a row is a mapping", "in FILE, row a"]),
    ("a:", "/a", ["null: a row is a mapping", "nothing is {}", "in FILE, row a"]),
    ("a: {}\n  a: {}", "/a", ["FILE", "duplicate key a"]),
    ("a b: {}", "/a", ["a b: not a name for a row", "in FILE"]),
    ("1: {}", "/1", ["1: not a name for a row", "quotes", "in FILE"]),
    ("[a, b]", "/a", ["rows=[a,b]: not a mapping", "FILE"]),
    ("a: {}\ntrain: {step: 3}", "/a", ["train.step=3", "train.steps", "in FILE"]),
    ("a: {train.steps: 3}\ntrain: 5", "/a", ["train=5: train is a section", "in FILE"]),
    ("a: {}\ntrain.steps: 3", "/a", ["train.steps: only the rows", "Write train: {steps: 3}", "in FILE"]),
    ("a: {model: gpt}\ndefaults: [override /modle: gpt]", "/a", ["modle", "did you mean model", "FILE"]),
    ("a: {model: gpt}\ndefaults: model", "/a", ["defaults=model: not a list", "FILE"]),
]


@pytest.mark.parametrize(("rows", "row", "says"), MISTAKES)
def test_mistakes_in_a_table(
    rows: str, row: str, says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experiment" / "t.yaml"
    path.parent.mkdir()
    path.write_text(f"# @package _global_\nrows:\n  {rows}\n")
    assert main(["train", f"experiment=t{row}", "--config-dir", str(tmp_path), "--cfg", "job"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for text in says:
        assert text.replace("FILE", str(path)) in captured.err
    for word in ("Traceback", "hydra", "omegaconf", "ConfigStore"):
        assert word not in captured.err


def test_table_without_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "experiment" / "t.yaml"
    path.parent.mkdir()
    path.write_text("rows:\n  a: {}\n")
    with pytest.raises(ConfigError, match=r"t\.yaml: the first line is not '# @package _global_'"):
        load_config(["experiment=t/a"], str(tmp_path))
