"""Composition: what the groups, the files and the command line come to."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from ngpt_train.config import ConfigError, list_experiments, load_config
from ngpt_train.config.architectures import architectures
from ngpt_train.config.compose import compose
from ngpt_train.config.help import help_text
from ngpt_train.config.overrides import expand
from ngpt_train.config.schema import schema_keys
from ngpt_train.config.validate import flatten
from ngpt_train.config.yaml_files import BUILT_IN, GROUPS, SCHEMA_GROUP, config_dir
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.ngpt.keys import NGPTConfig


def test_what_follows_another_group_unless_given() -> None:
    ngpt, gpt = load_config(["model=ngpt"]), load_config(["model=gpt", "train.steps=500"])
    assert type(ngpt.model) is NGPTConfig
    assert type(gpt.model) is GPTConfig
    assert (ngpt.optim.name, ngpt.optim.weight_decay, ngpt.schedule.warmup_steps) == ("adam", 0.0, 0)
    assert (gpt.optim.name, gpt.optim.weight_decay, gpt.schedule.warmup_steps) == ("adamw", 0.1, 50)
    given = load_config(["model=gpt", "recipe=ngpt"])
    assert type(given.model) is GPTConfig
    assert given.optim == replace(ngpt.optim, lr_source=given.optim.lr_source)  # which says that it is ngpt's
    # As does the tokenizer the data.
    assert load_config(["data=local", "data.path=x", "tokenizer=bytes"]).tokenizer.kind == "bytes"
    assert load_config(["data=local", "data.path=x"]).tokenizer.kind == "sentencepiece"


def test_a_recipes_auto_for_another_architecture(tmp_path: Path) -> None:
    """Caught: a misspelt key that is dropped with it; a value that is no `auto`, which would be lost without a word."""
    (tmp_path / "recipe").mkdir()
    recipe = tmp_path / "recipe/mine.yaml"
    for wrong in ("s_z: {inti: auto}", "s_z: {init: 2}"):
        recipe.write_text(f"# @package _global_\ndefaults: [ngpt, _self_]\nmodel:\n  {wrong}\n")
        with pytest.raises(ConfigError, match=r"(?s)model\.s_z\.in.*no such key.*mine\.yaml"):
            load_config(["model=gpt", "recipe=mine"], str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [["model=normformer", "data=hf"], ["experiment=quickstart", "scale=debug"], ["recipe=nugpt", "scale=8m"]],
)
def test_the_order_is_hydras(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values as by Hydra's documented `compose`. Caught: another version of Hydra, whose internal list of the
    files is another one."""
    composition = compose(arguments)
    store = ConfigStore.instance()
    own = {*GROUPS, SCHEMA_GROUP.partition("/")[0], "train.yaml"}
    monkeypatch.setattr(store, "repo", {name: node for name, node in store.repo.items() if name not in own})
    for path, node in (BUILT_IN | {f"{SCHEMA_GROUP}/{name}": {} for name in architectures()}).items():
        group, _, name = path.rpartition("/")
        store.store(group=group, name=name, node=node, package=group.rpartition("/")[2])
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        merged: Any = OmegaConf.to_container(hydra.compose("train", overrides=arguments))
    leaves = [(x, value) for x, value in flatten(merged, composition.keys) if x in composition.keys]
    assert len(leaves) > 20
    for name, value in leaves:
        assert attrgetter(name)(composition.config) == composition.keys[name].held(value), name


def test_an_experiment_can_be_overridden() -> None:
    assert "quickstart" in list_experiments()
    config = load_config(["experiment=quickstart", "model=gpt", "scale=debug", "logging.wandb.mode=offline"])
    assert (config.run.name, config.logging.wandb.mode) == ("quickstart", "offline")
    assert (config.model.name, config.scale.name, config.optim.name) == ("gpt", "debug", "adamw")


# Sizes whose rate the rows of their tables say.
SAID_BY_ROWS = ("engpt", "ptb_3l", "wikitext103_6l", "wikitext103_16l", "iwslt14", "wmt14_big")
PUBLISHED = ("125m", "355m", "0.5b", "1b", "1.3b", "2.7b", "gpt3_125m", "gpt3_355m", "tnt", "tnt_baseline")


@pytest.mark.slow
def test_every_packaged_option_composes() -> None:
    # Sizes of one paper, for which the other recipes have no learning rate.
    owners = {"tnt": "ntransformer", "tnt_baseline": "gpt_encoder_decoder"}
    owners |= {"gpt3_125m": "normformer", "gpt3_355m": "normformer", "nugpt": "ngpt", "training_ngpt": "ngpt"}
    keys = {
        "data/local": ["data.path=x"],
        "data/pairs": ["data.path=x"],
        "data/tokens": ["data.path=x"],
        "data/hf": ["data.repo=a/b"],
    }
    keys |= {f"scale/{size}": ["optim.lr=1e-3"] for size in SAID_BY_ROWS}
    keys |= {"tokenizer/hf": ["tokenizer.path=x"], "data/mixture": ["data.mixture=a 1 local x; b 1 tokens y"]}
    for group in set(GROUPS) - {"experiment", "study"}:  # studies: test_definition.py
        for path in (config_dir() / group).glob("*.yaml"):
            needed = keys.get(f"{group}/{path.stem}", [])
            owner = owners.get(path.stem, path.stem)
            model = [f"model={owner}"] if group == "recipe" or path.stem in owners else []
            config = load_config([f"{group}={path.stem}", *needed, *model])
            if group == "scale" and path.stem in PUBLISHED:
                assert (config.eval.rows, config.eval.tokens) == (None, 4_194_304)  # over the schema's rows


@pytest.mark.parametrize(
    ("scale", "shape", "steps"),
    [
        ("125m", (12, 768, 12, 2048), 20_000),
        ("355m", (24, 1024, 16, 2736), 20_000),
        ("0.5b", (24, 1024, 16, 4096), 100_000),
        ("1b", (36, 1280, 20, 5120), 100_000),
    ],
)
def test_published_scales(scale: str, shape: tuple[int, ...], steps: int) -> None:
    for architecture in ("gpt", "ngpt"):
        config = load_config([f"scale={scale}", f"model={architecture}"])
        model = config.model
        assert (model.n_layers, model.d_model, model.n_heads, model.d_mlp) == shape
        assert (model.n_kv_heads, model.context) == (model.n_heads, 1024)
        assert (config.train.steps, config.train.batch_rows, config.train.batch_tokens) == (steps, 512, 2**19)
        assert config.run.name == f"{architecture}-{scale}-seed0"
        assert isinstance(config.optim.lr, float)


def test_lr_is_looked_up_by_scale_and_context() -> None:
    def lr(*arguments: str) -> float | str:
        return load_config(["model=ngpt", "scale=0.5b", *arguments]).optim.lr

    assert lr() == lr("model.context=2048") == 1.0e-3
    assert lr("model.context=512") == 1.5e-3  # half the tokens
    assert lr("model.context=4096") == lr("model.context=6000") == 1.5e-3
    assert lr("model.context=4096", "train.steps=20000") == 3.0e-3
    assert isinstance(lr("optim.lr=1"), float)  # though written as an integer
    assert lr("optim.lr=1e-3", "optim.lr=0.001") == 1e-3  # the same value twice


def test_the_later_of_eval_rows_and_eval_tokens_counts(tmp_path: Path) -> None:
    def chosen(*options: str, config_dir: str | None = None) -> tuple[int | None, int | None]:
        found = load_config(["model=gpt", "optim.lr=1e-3", *options], config_dir).eval
        return found.rows, found.tokens

    assert chosen("scale=debug") == (64, None)
    assert chosen("scale=125m", "eval.rows=8") == (8, None)
    assert chosen("eval.tokens=100") == (None, 100)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/mine.yaml").write_text("rows: 5\n")
    assert chosen("scale=125m", "eval=mine", config_dir=str(tmp_path)) == (5, None)


def test_wandb_is_told_what_the_run_is() -> None:
    """Caught: a row whose table cannot be found; a name that the user gives and that does not count."""

    def shown(*options: str) -> tuple[str | None, str | None, list[str] | None]:
        wandb = load_config(options).logging.wandb
        return wandb.name, wandb.group, wandb.tags

    assert shown("model=gpt", "scale=debug", "run.seed=3", "optim.lr=1e-3") == (
        *("gpt-debug-seed3", "debug"),
        ["gpt", "debug"],
    )
    row = "paper/ngpt_table6/no_qk_norm"
    assert shown(f"experiment={row}", "run.name=mine") == ("mine", row, ["ngpt", "0.5b", "paper/ngpt_table6"])
    assert shown("experiment=quickstart") == ("quickstart", "quickstart", ["ngpt", "tiny", "quickstart"])
    given = [f"logging.wandb.{key}" for key in ("name=a", "group=b", "tags=[c,d]", "notes=e f")]
    assert shown("experiment=quickstart", *given) == ("a", "b", ["c", "d"])
    assert load_config(given).logging.wandb.notes == "e f"
    assert shown("logging.wandb.tags=[]")[2] == []


def test_warmup_is_a_tenth_up_to_2000_steps() -> None:
    def warmup(steps: int) -> int | str:
        return load_config(["model=gpt", f"train.steps={steps}"]).schedule.warmup_steps

    assert [warmup(steps) for steps in (1, 500, 20_000, 100_000)] == [0, 50, 2000, 2000]


def test_a_warmup_in_tokens(tmp_path: Path) -> None:
    """Rounded up to whole steps; of the two keys the later one counts. Caught: rounded down, or the earlier one."""
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    path.write_text("# @package _global_\nschedule: {warmup_tokens: 375000000}\n")

    def warmup(*overrides: str) -> tuple[int | str, int | None]:
        own = ["model=normformer", "scale=gpt3_125m", "experiment=mine", *overrides]
        schedule = load_config(own, str(tmp_path)).schedule
        return schedule.warmup_steps, schedule.warmup_tokens

    assert warmup() == (716, 375_000_000)  # 715.3 batches of 524,288 tokens
    assert warmup("schedule.warmup_tokens=374865920") == (715, 374_865_920)
    assert warmup("train.batch_rows=512") == (358, 375_000_000)
    assert warmup("schedule.warmup_tokens=0") == (0, 0)
    assert warmup("schedule.warmup_steps=7") == (7, None)
    assert warmup("schedule.warmup_steps=auto") == (2000, None)
    assert warmup("train.steps=300") == (30, None)  # no room: auto
    with pytest.raises(ConfigError, match=r"schedule\.warmup_tokens=375000000.*the warmup leaves no step"):
        warmup("schedule.warmup_tokens=375000000", "train.steps=716")
    with pytest.raises(ConfigError, match="both set the warmup"):
        warmup("schedule.warmup_tokens=375000000", "schedule.warmup_steps=700")


def test_a_warmup_belongs_to_the_steps_it_was_written_for(tmp_path: Path) -> None:
    """A table's 500 of 1000 steps are auto for 500 steps that are set later; what is set together must fit."""
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("# @package _global_\ntrain: {steps: 1000}\nschedule: {warmup_steps: 500}\n")

    def warmup(*overrides: str) -> int | str:
        return load_config(["model=gpt", "experiment=mine", *overrides], str(tmp_path)).schedule.warmup_steps

    assert [warmup(f"train.steps={steps}") for steps in (2000, 501, 500, 3)] == [500, 500, 50, 0]
    assert warmup() == warmup("scale=debug") == warmup("train.stop_at=3") == 500
    for both in (["schedule.warmup_steps=500", "train.steps=500"], ["schedule.warmup_steps=1000"]):
        with pytest.raises(ConfigError, match="the warmup leaves no step"):
            warmup(*both)


def test_free_text_is_taken_as_it_is() -> None:
    prompt = "def f(x, y=[1]): # it's {a: b}"
    assert load_config([f"generate.prompt={prompt}"]).generate.prompt == prompt
    assert load_config(["generate.prompt='  quoted'"]).generate.prompt == "  quoted"
    assert load_config(["run.name=1e3"]).run.name == "1e3"
    assert load_config(["data=local", "data.path=/a b/c,d/*.txt"]).data.path == "/a b/c,d/*.txt"
    assert load_config(["generate.checkpoint=null"]).generate.checkpoint is None
    assert load_config(["generate.prompt='null'"]).generate.prompt == "null"
    assert load_config(["generate.prompt= 5 "]).generate.prompt == " 5 "


def test_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_DIRECTORY", "/scratch/me")
    assert load_config(["run.root=${oc.env:SCRATCH_DIRECTORY}/runs"]).run.root == "/scratch/me/runs"
    with pytest.raises(ConfigError, match=r"run\.max_time=-5\.0: must be a number > 0"):
        load_config(["run.max_time=${oc.decode:'-5'}"])


def test_what_has_no_effect_is_none_or_the_default() -> None:
    def powernorm(*arguments: str) -> tuple[object, object]:
        model: Any = load_config(["model=powernorm", "train.steps=500", *arguments]).model
        return model.psi_warmup_steps, model.group_scaling

    assert powernorm() == (50, 4)
    assert powernorm("model.norm=batch", "model.psi_warmup_steps=auto") == (0, 4)
    assert powernorm("model.norm=layer") == powernorm("model.norm=layer", "model.group_scaling=0") == (0, 0)
    assert powernorm("model.norm=layer", "model.group_scaling=2") == (0, 2)
    load_config(["model.s_u.kind=fixed", "model.s_u.scale=1"])
    load_config(["model=normformer", "model.d_model=100", "model.n_heads=4"])  # without RoPE any width will do


@pytest.mark.parametrize("chosen", ["ngpt", "gpt"])
def test_help_shows_the_keys_of_every_architecture(chosen: str) -> None:
    lines = help_text([f"model={chosen}"]).splitlines()
    of_chosen = schema_keys(architectures()[chosen])
    own, _, others = " ".join(" ".join(lines).split()).partition("Keys that other architectures have")
    for architecture, schema in architectures().items():
        for key in schema_keys(schema).values():
            same = key.name == "model.name" or key == of_chosen.get(key.name)
            assert f" {key.name}=" in (own if same else others)
            assert key.doc in (own if same else others)
        assert architecture == chosen or f"model={architecture}: " in others
    assert len([line for line in lines if line.startswith("  model.qk_norm=")]) == 3  # those of nGPT, GPT and composed
    assert len([line for line in lines if line.startswith("  model.alpha_mlp.kind=")]) == 1


def test_a_file_that_changes_between_two_calls_counts(tmp_path: Path) -> None:
    """Nor is a config part of the next one. Caught: a composition remembered for a file that was edited since."""
    path = tmp_path / "model" / "mine.yaml"
    path.parent.mkdir()
    lr = load_config(["model=gpt"]).optim.lr
    widths = []
    for text in ("d_model: 96", "d_model: 128", "d_model: 128\nqk_norm: true"):
        path.write_text(f"defaults: [gpt]\n{text}\n")
        config: Any = load_config(["model=mine"], str(tmp_path))
        widths.append((config.model.d_model, config.model.qk_norm))
        config.optim.lr_table["tiny"][256] = 7.0
        config.model.d_model = 8
    assert widths == [(96, False), (128, False), (128, True)]
    assert load_config(["model=mine"], str(tmp_path)).optim.lr == load_config(["model=gpt"]).optim.lr == lr
    path.write_text("defaults: [ngpt]\n")
    assert load_config(["model=mine"], str(tmp_path)).model.name == "ngpt"
    path.unlink()
    with pytest.raises(ConfigError, match="model=mine: no such option"):
        load_config(["model=mine"], str(tmp_path))


def test_a_scale_of_ones_own_sets_any_section(tmp_path: Path) -> None:
    """Caught: built-in options that repeat the schema's defaults, and so override what a user's file says."""
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale/mine.yaml").write_text(
        "# @package _global_\ndefaults: [debug]\n"
        "checkpoint: {keep_last: 9}\neval: {rows: 7}\nlogging: {tensorboard: true}\n"
    )
    config = load_config(["scale=mine"], str(tmp_path))
    assert (config.checkpoint.keep_last, config.eval.rows, config.logging.tensorboard) == (9, 7, True)


@pytest.mark.parametrize("group", ["parallel", "eval"])
def test_a_group_without_files_is_one(group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """parallel=fsdp is parallel.kind=fsdp, on the command line, in a defaults list and in a row; own files are options,
    too, unless their name is taken."""
    option, key, value = {"parallel": ("fsdp", "kind", "fsdp"), "eval": ("default", "rows", 64)}[group]
    for name, content in {
        f"{group}/{option}": f"{key}: nosuch\n",
        f"{group}/mine": "every: 7\n" if key != "kind" else f"defaults: [{option}]\n",
        "experiment/list": f"# @package _global_\ndefaults:\n  - override /{group}: {option}\n",
        "experiment/table": f"# @package _global_\nrows:\n  row: {{{group}: mine}}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(content)

    for argument in (f"{group}={option}", "experiment=list", "experiment=table/row", f"{group}=mine"):
        section = getattr(load_config([argument], str(tmp_path)), group)
        assert getattr(section, key) == value
        assert key == "kind" or section.every == (7 if argument.endswith(("row", "mine")) else section.every)
    assert (
        f"{group}/{option}.yaml is not used: the built-in {group}={option} has the same name" in capsys.readouterr().err
    )


def test_a_message_names_the_option_that_set_a_key() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.kind is set by parallel=single"):
        load_config(["parallel=single"], world_size=2)


def test_threads_may_load_at_the_same_time() -> None:
    with ThreadPoolExecutor(4) as pool:
        configs = list(pool.map(lambda seed: load_config([f"run.seed={seed}"]), range(8)))
    assert [config.run.seed for config in configs] == list(range(8))


def test_own_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "it's mine"
    for name, content in {
        # Keys of a model file win over the scale's.
        "model/wide": "defaults: [gpt]\nd_model: 192\nqk_norm: true\n",
        "model/gpt": "defaults: [ngpt]\n",
        "scale/small": "# @package _global_\nscale: {name: small}\ntrain: {steps: 7, batch_rows: 2}\n",
        # Merges with the table of the recipe that it builds upon.
        "recipe/fast": "# @package _global_\ndefaults: [gpt]\noptim: {lr_table: {small: {256: 1}, tiny: {256: 0.5}}}\n",
        "experiment/mine": "# @package _global_\ndefaults:\n  - override /model: wide\n  - override /recipe: fast\n",
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.yaml").write_text(content)

    config = load_config(["experiment=mine", "scale=small"], str(directory))
    assert config.model == dataclasses.replace(config.model, name="gpt", d_model=192, qk_norm=True)
    assert (config.train.steps, config.optim.lr, config.optim.name) == (7, 1.0, "adamw")
    assert load_config(["experiment=mine", "scale=tiny"], str(directory)).optim.lr == 0.5
    of_gpt = load_config(["model=gpt", "scale=debug"]).optim.lr
    assert load_config(["experiment=mine", "scale=debug"], str(directory)).optim.lr == of_gpt
    capsys.readouterr()

    assert load_config(["model=gpt"], str(directory)).model.name == "gpt"
    warning = capsys.readouterr().err
    assert f"{directory}/model/gpt.yaml is not used" in warning
    assert "rename" in warning
    assert "wide" not in warning


def test_sweep_is_the_product_of_its_values() -> None:
    assert expand(["optim.lr=1e-3,3e-3", "train.steps=5", "model=gpt,ngpt"]) == [
        ["optim.lr=0.001", "train.steps=5", "model=gpt"],
        ["optim.lr=0.001", "train.steps=5", "model=ngpt"],
        ["optim.lr=0.003", "train.steps=5", "model=gpt"],
        ["optim.lr=0.003", "train.steps=5", "model=ngpt"],
    ]
    assert expand(["run.seed=range(0,3)"]) == [["run.seed=0"], ["run.seed=1"], ["run.seed=2"]]
    assert expand(["optim.betas=[0.9,0.95],[0.8,0.9]"]) == [["optim.betas=[0.9,0.95]"], ["optim.betas=[0.8,0.9]"]]
    assert expand(["data.path=/a b/x,'/c,d'"]) == [["data.path=/a b/x"], ["data.path=/c,d"]]
    assert expand(["generate.prompt=f(x): y"]) == [["generate.prompt=f(x): y"]]
