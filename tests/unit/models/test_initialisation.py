"""model.init.*: the standard deviations at step 0, their defaults, and the tables of the recipes."""

import math
from pathlib import Path

import pytest
import yaml

from ngpt_train.config import Config, ConfigError, list_experiments, load_config
from ngpt_train.config.model_keys import KINDS, ModelConfig
from ngpt_train.config.stored import check_resume, read_yaml, with_first_values, write_yaml
from ngpt_train.models import build_model, export_weights
from ngpt_train.models.weights import by_path, standard_deviations
from ngpt_train.report.launch_plan import describe_plan, make_plan

MODELS = (
    *("gpt", "ngpt", "normformer", "powernorm", "composed"),
    *("ntransformer", "gpt_encoder_decoder", "composed_encoder_decoder"),
)
PAPERS = ["model.init.embedding=0.02", "model.init.output=0.02", "model.init.hidden=0.02"]


def config(*arguments: str) -> Config:
    return load_config(["scale=debug", "model.vocab_size=64", *arguments])


def starts(model: ModelConfig) -> list[float | str]:
    return [getattr(model.init, kind) for kind in KINDS]


def papers_starts(model: ModelConfig) -> list[float | str]:
    return [model.paper_start(f"init.{kind}") for kind in KINDS]


def paper(name: str, d: int) -> dict[str, float]:
    """The papers' standard deviations of a decoder, by kind, without the residual matrices' division."""
    if name in ("ngpt", "ntransformer"):
        return dict.fromkeys(KINDS, 1 / math.sqrt(d))
    return dict.fromkeys(KINDS, 0.02) | ({"embedding": 0.5 / math.sqrt(d)} if name == "normformer" else {})


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_at_their_scales(name: str) -> None:
    """At 125m and above every architecture starts as before these keys existed. Caught: a table for a large scale, W_o
    divided by another number of writes."""
    model = load_config([f"model={name}", "scale=125m", "optim.lr=1"]).model
    writes = 2 * model.n_layers
    for kind, std in paper(name, model.d_model).items():
        expected = std / math.sqrt(writes) if kind == "residual" else std
        assert model.init.std(kind, model.d_model, writes) == pytest.approx(expected, rel=1e-15), kind
    assert not any(model.measured_starts(scale) for scale in ("125m", "0.5b", "1b"))


@pytest.mark.slow
def test_papers_rows_keep_the_papers() -> None:
    """Whatever the recipes' tables have for small scales; a row of each table."""
    for name in {name.rpartition("/")[0]: name for name in list_experiments() if name.startswith("paper/")}.values():
        model = load_config([f"experiment={name}"]).model
        expected = papers_starts(model)
        if "powernorm_table1" in name:  # fairseq's own, of the embedding that all three share
            expected[KINDS.index("embedding")] = "1/sqrt(d_model)"
        assert starts(model) == expected, name


@pytest.mark.parametrize("name", ["gpt", "normformer", "gpt_encoder_decoder"])
def test_weights_are_drawn_as_the_keys_say(name: str) -> None:
    """To the bit; residual=0 gives zeros. Caught: a key that another kind of matrix takes."""
    untied = [] if name != "normformer" else ["model.tied_embeddings=false"]
    chosen = ["model.init.embedding=1", "model.init.output=0.5", "model.init.hidden=1/sqrt(d_model)"]
    model = build_model(config(f"model={name}", *untied, *chosen, "model.init.residual=0").model, seed=5)
    weights = export_weights(model)
    for path, std in (("embedding", 1.0), ("output", 0.5), ("layers.1.attention.wq", 1 / math.sqrt(64))):
        weight = weights[path.replace(".attention", "")]
        assert weight.equal(by_path(5, path, tuple(weight.shape), std)), path
    assert not any(weights[f"layers.{i}.{part}"].any() for i in (0, 1) for part in ("wo", "w_down"))
    assert standard_deviations(model) == {"embedding": [1.0], "output": [0.5], "hidden": [0.125], "residual": [0.0]}


def test_on_the_sphere_they_have_no_effect() -> None:
    """Rows are projected, so that only directions count: refused, in words. Free rows take them."""
    with pytest.raises(ConfigError, match=r"model\.init\.hidden=0\.1.*model\.constraint=projection"):
        config("model=ngpt", "model.init.hidden=0.1")
    free = config("model=ngpt", "model.constraint=none", "model.init.hidden=0.1")
    assert standard_deviations(build_model(free.model))["residual"] == [0.1 / math.sqrt(4)]


USERS_RECIPE = """# @package _global_
defaults:
  - gpt
  - _self_
model:
  init: {embedding: auto, output: auto, hidden: auto, residual: auto}
  init_table:
    debug: {init.embedding: 3, init.output: 1/sqrt(d_model), init.hidden: 0.5/sqrt(d_model), source: "our sweep"}
"""


@pytest.fixture
def recipes(tmp_path: Path) -> str:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text(USERS_RECIPE)
    return str(tmp_path)


def test_a_table_by_scale(recipes: str) -> None:
    """Caught: a table that counts where a key was set, at another scale, or for a matrix that is not there."""

    def of(*arguments: str) -> tuple[list[float | str], str]:
        found = load_config(["recipe=mine", "optim.lr=1", *arguments], recipes)
        model, scale = found.model, found.scale.name
        return starts(model), model.source_of_starts(scale)

    divided = "hidden/sqrt(writes)"
    measured = [3.0, "1/sqrt(d_model)", "0.5/sqrt(d_model)", divided]
    assert of("model=gpt", "scale=debug") == (measured, "our sweep")
    assert of("model=gpt", "scale=125m") == ([0.02, 0.02, 0.02, divided], "")
    assert of("model=gpt", "scale=debug", "model.init.embedding=0.5") == ([0.5, *measured[1:]], "")
    assert of("model=gpt", "scale=debug", "model.tied_embeddings=true")[0] == ["1/sqrt(d_model)", 0.02, *measured[2:]]
    scaled = of("model=composed", "scale=debug", "model.scaled_embedding=true")[0]
    assert scaled == ["1/sqrt(d_model)", *measured[1:]]


@pytest.mark.parametrize(
    "table", ["1", "{init.hiden: 1}", "{init.hidden: 0}", "{init.hidden: auto}", "{source: 1}", "{n_layers: 1}"]
)
def test_a_table_is_checked(table: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text(f"# @package _global_\nmodel:\n  init_table: {{debug: {table}}}\n")
    with pytest.raises(ConfigError, match=r"(?s)model\.init_table.*debug.*mine\.yaml"):
        load_config(["recipe=mine", "optim.lr=1", "scale=debug"], str(tmp_path))


def test_a_resume_keeps_what_the_run_began_with(recipes: str, tmp_path: Path) -> None:
    """A run from before a table had an entry goes on; a value that was asked for is compared. Caught: an entry that
    ends a run, or that a run.json says of weights which began with another."""
    older, new = config("model=gpt", *PAPERS), load_config(["recipe=mine", "scale=debug", "model=gpt"], recipes)
    write_yaml(older, tmp_path / "config.yaml")
    stored = read_yaml(tmp_path / "config.yaml")
    new.model.vocab_size, new.run.name = 64, older.run.name
    check_resume(stored, new)
    assert with_first_values(new, stored).model.init == older.model.init
    with pytest.raises(ConfigError, match=r"model\.init\.hidden: 0\.02 -> 0\.1"):
        check_resume(stored, config("model=gpt", *PAPERS[:2], "model.init.hidden=0.1"))


def test_a_config_without_the_keys_is_the_papers(tmp_path: Path) -> None:
    """As stored before they existed, whatever the recipe's table has now."""
    for name in ("gpt", "ngpt", "normformer"):
        write_yaml(config(f"model={name}"), tmp_path / "config.yaml")
        stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
        del stored["model"]["init"], stored["model"]["init_table"]
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
        model = read_yaml(tmp_path / "config.yaml").model
        assert {kind: getattr(model.init, kind) for kind in KINDS} == {
            kind: model.paper_start(f"init.{kind}") for kind in KINDS
        }


def test_plan_shows_them() -> None:
    text = describe_plan(made := make_plan(config("model=gpt_encoder_decoder", *PAPERS, "model.n_encoder_layers=1")))
    assert made["init"]["residual"] == {
        "rule": "hidden/sqrt(writes)", "std": [0.02 / math.sqrt(2), 0.02 / math.sqrt(6)]
    }  # fmt: skip
    assert "0.01414, 0.008165" in text
