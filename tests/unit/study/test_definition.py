"""Study files: the runs that follow from them, the messages for mistakes, and the allowed changes."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ngpt_train.__main__ import main
from ngpt_train.config import ConfigError, load_config
from ngpt_train.config.arguments import arguments_of
from ngpt_train.config.yaml_files import Files
from ngpt_train.core.errors import DataError
from ngpt_train.study.begun_study import check_stored
from ngpt_train.study.definition import Study, merged, read_stored, read_study, write_study
from ngpt_train.study.points import DONE, Point, Runs, differences
from tests.unit.study.small_study import YAML, leave, options, study_of

PACKAGED = [name for name in Files().options["study"] if name != "null"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PACKAGED)
def test_every_packaged_study_composes(name: str) -> None:
    """Caught: an arm of a packaged study whose model lacks a key; a baseline that is no arm."""
    given = [f"study={name}", *(["data.path=x"] if name == "powernorm_translation" else [])]
    study = read_study(load_config(given[:1]).study, given)
    Runs(study).check()
    assert study.name == name
    assert study.baseline in study.arms
    one_seed = name.startswith(("quickstart", "initialisation"))
    assert study.seeds == ((0,) if one_seed else (0, 1, 2))


def test_a_study_of_translations_wants_translations(tmp_path: Path) -> None:
    """Caught: runs of hours without the score that they are compared in."""
    given = ["study=powernorm_translation", "study.metric=bleu", "data.path=x"]
    study = read_study(load_config(given[:2]).study, given)
    Runs(study).check()
    without = replace(study, shared=merged(study.shared, ["eval.beams=null"]))
    with pytest.raises(ConfigError, match=r"study\.metric=bleu.*\n.*eval\.beams"):
        Runs(without).check()
    one, other = (Runs(s).config(Runs(s).first_point("pn", 4_096_000)) for s in (study, without))
    assert [name for name, *_ in differences(one, other)] == ["eval.beams"]


def test_budgets_are_whole_steps_of_the_arms_own_batch(tmp_path: Path) -> None:
    """Caught: steps of another arm's batch; a budget that is cut, not rounded; a schedule that is not the run's."""
    text = YAML.replace("{model: ngpt}", "{model: ngpt, train.batch_rows: 32}")
    study = study_of(tmp_path, "study.budgets=[20000]", text=text)
    runs = Runs(study)
    assert (runs.steps("gpt", 20000), runs.steps("ngpt", 20000)) == (39, 10)  # of 8 x 64 and 32 x 64 tokens
    config = runs.config(runs.first_point("gpt", 20000))
    assert (config.train.steps, config.schedule.warmup_steps, config.optim.lr) == (39, 3, 8e-3)


def test_a_tuned_batch_or_context_changes_the_steps_and_not_the_tokens(tmp_path: Path) -> None:
    """Caught: a run with twice the batch that sees twice the tokens of its budget; one whose end is not recognised."""
    text = f"{YAML}tune: {{train.batch_rows: [8, 4, 32], model.context: [64, 32]}}\n"
    runs = Runs(study_of(tmp_path, "study.budgets=[20480]", text=text))
    first = runs.first_point("gpt", 20480)
    for rows, context, steps in [(8, 64, 40), (4, 64, 80), (32, 64, 10), (32, 32, 20)]:
        point = replace(first, values=(("model.context", context), first.values[1], ("train.batch_rows", rows)))
        config = runs.config(point)
        assert config.train.steps * config.train.rows_per_step * config.model.context == 20480
        leave(runs, point, {"step": steps})
        assert runs.result(point).state == DONE


def test_values_of_batch_and_warm_up(tmp_path: Path) -> None:
    """Caught: a batch by a factor that goes on to steps of other budgets; a warm-up's list that is as many steps at
    twice the budget; words that are multiplied."""
    text = f"{YAML}tune: {{train.batch_rows: 2, schedule.warmup_steps: [3, auto, 0, 4]}}\n"
    runs = Runs(study_of(tmp_path, "study.budgets=[20480,40960]", text=text))
    runs.check()
    assert runs.grids("gpt", 20480)["train.batch_rows"].values == (8, 4, 2, 1, 16, 32, 64)  # 128 rows have 2 steps
    assert runs.grids("gpt", 20480)["schedule.warmup_steps"].values == (3, "auto", 0, 4)
    assert runs.grids("gpt", 40960)["schedule.warmup_steps"].values == (6, "auto", 0, 8)


def test_a_runs_arguments_and_directory(tmp_path: Path) -> None:
    """Caught: a key of the study or the command line that does not reach the runs, a tuned value that loses digits, a
    directory that is not named after them."""
    study = study_of(tmp_path, "optim.clip_norm=0.5", "tokenizer=gpt2", "train.batch_rows=4")
    runs = Runs(study)
    lr = 0.004 * 2**0.5
    point = Point("gpt", 5120, (("model.s_z.init", "sqrt(d)"), ("optim.lr", lr), ("optim.weight_decay", 0.03)), 7)
    assert point.directory == "gpt-5120-model.s_z.initsqrt_d_-lr0.00565685-weight_decay0.03-seed7"
    point = replace(point, values=(("optim.lr", lr),))
    config = runs.config(point)
    assert (config.optim.lr, config.optim.clip_norm, config.train.steps) == (lr, 0.5, 20)
    assert (config.run.seed, config.run.name, config.run.root) == (7, point.directory, str(study.runs))
    assert config.tokenizer.kind == "gpt2"
    assert config.logging.wandb.group == "small"
    assert config.logging.wandb.tags == ["gpt", "budget 5120", "seed 7"]
    long = replace(point, values=(("optim.lr", lr), ("data.mixture", "x" * 300)))
    assert len(long.directory) < 200
    assert long.directory != replace(long, seed=8).directory


def test_further_keys_and_an_explicit_factor(tmp_path: Path) -> None:
    """Caught: lr that is not tuned where another key is; a factor or values that are lost."""
    text = f"{YAML}tune: {{optim.weight_decay: [0.03, 0.1], optim.lr: 1.5}}\n".replace("ngpt: {model: ngpt}", "")
    study = study_of(tmp_path, text=text)
    assert list(study.tune.items()) == [("optim.lr", 1.5), ("optim.weight_decay", (0.03, 0.1))]
    only = study_of(tmp_path, text=text.replace(", optim.lr: 1.5", ""))
    assert list(only.tune) == ["optim.lr", "optim.weight_decay"]


# The change of the file, the arguments, and what the message names: key, value, place and fix.
MISTAKES: dict[str, tuple[str, list[str], list[str]]] = {
    "no study": ("", ["study=null"], ["study=null", "gpt_vs_ngpt"]),
    "name": ("name: a/b\n", [], ["study.name=a/b", "Letters"]),
    "baseline": ("baseline: gtp\n", [], ["study.baseline=gtp", "did you mean gpt", "Arms: gpt, ngpt"]),
    "arm's name": ("arms: {'a/b': {model: gpt}}\n", [], ["study.arms", "a/b", "letters"]),
    "arm is no row": ("arms: {a: gpt}\n", [], ["study.arms", "such as {model: gpt"]),
    "arm's key": ("arms: {a: {model: gpt, model.qk_nrm: true}}\n", [], ["model.qk_nrm=true", "qk_norm", "arm a"]),
    "arm's value": ("arms: {a: {model: gpt, optim.eps: -1}}\n", [], ["arm a", "optim.eps=-1", "> 0"]),
    "study's key in an arm": ("arms: {a: {study.seeds: 1}}\n", [], ["study.seeds=1", "arm a", "Leave it out"]),
    "decided": ("shared: {run.seed: 3}\n", [], ["run.seed=3", "study.seeds", "in shared"]),
    "decided on the line": ("", ["train.steps=5"], ["train.steps=5", "study.budgets"]),
    "tuned on the line": ("", ["optim.lr=1"], ["optim.lr=1", "study.tune"]),
    "arms differ in it": ("", ["model=gpt"], ["model=gpt", "arm gpt has model=gpt"]),
    "a run's key on the line": ("", ["scal=debug"], ["scal=debug", "scale"]),
    "table on the line": ("", ["study.arms=x"], ["study.arms", "study=my"]),
    "no budget": ("budgets: []\n", [], ["study.budgets=[]", "For example"]),
    "less than a step": ("budgets: [100]\n", [], ["arm gpt, budget 100", "512"]),
    "budgets of the same steps": ("budgets: [5120, 5200]\n", [], ["5200 tokens are 10 steps", "name it once"]),
    "interaction": ("interactions: {x: [gpt, ngpt]}\n", [], ["study.interactions", "x:", "four arms"]),
    "an interaction's arm": (
        "arms: {gpt: {model: gpt}, ngpt: {model: ngpt}, a: {model: gpt, optim.eps: 2}}\n"
        "interactions: {x: [gpt, ngpt, a, npgt]}\n",
        [],
        ["study.interactions: x: npgt", "did you mean ngpt", "Arms: gpt"],
    ),
    "seed twice": ("", ["study.seeds=[1,1]"], ["study.seeds=[1,1]", "Name each once"]),
    "factor": ("tune: {optim.lr: 1}\n", [], ["study.tune", "optim.lr", "factor"]),
    "tuned values": ("tune: {optim.eps: [1]}\n", [], ["study.tune", "optim.eps", "list of two values", "a factor"]),
    "tuned factor": ("tune: {ngpt: {optim.eps: 1}}\n", [], ["study.tune", "ngpt: optim.eps", "factor from 1.05"]),
    "an arm's own rate": ("tune: {ngpt: {optim.lr: 3}}\n", [], ["study.tune", "ngpt: optim.lr", "same for all arms"]),
    "tuned in no arm": ("tune: {nggpt: {optim.eps: 2}}\n", [], ["study.tune: nggpt", "did you mean ngpt", "Arms: gpt"]),
    "tuned twice": ("tune: {optim.eps: 2, ngpt: {optim.eps: 3}}\n", [], ["ngpt: optim.eps", "for all arms", "once"]),
    "tuned by no factor": (
        "arms: {n: {model: ngpt, model.s_z.scale: 1/sqrt(d)}}\ntune: {model.s_z.scale: 2}\n",
        [],
        ["model.s_z.scale: 1/sqrt(d) of arm n is no number to multiply by 2", "list the values"],
    ),
    "another's key": ("tune: {model.s_z.scale: 2}\n", [], ["arm gpt has no such key", "{NAME: {model.s_z.scale: 2}}"]),
    "tuned factor of no key": ("tune: {optim.epsilon: 2}\n", [], ["optim.epsilon", "no such key", "study.tune"]),
    "an arm's key on the line": (
        "tune: {ngpt: {optim.eps: 2}}\n",
        ["optim.eps=1e-9"],
        ["optim.eps=1e-9: it is tuned", "study.tune"],
    ),
    "descent's budget": (
        "tune: {optim.eps: 2}\ndescent_budget: 7\n",
        [],
        ["study.descent_budget=7", "[25600,5120]", "Name one of them"],
    ),
    "no descent": ("descent_runs: 7\n", [], ["study.descent_runs=7", "no key beside optim.lr", "further keys"]),
    "tuned key": ("tune: {optim.epsilon: [1.0e-8, 1.0e-6]}\n", [], ["optim.epsilon", "no such key", "study.tune"]),
    "tuned value": ("tune: {optim.eps: [1.0e-8, -1]}\n", [], ["optim.eps=-1", "> 0", "study.tune"]),
    "tuned value twice": ("tune: {optim.eps: [1.0e-8, 1.0e-8]}\n", [], ["optim.eps", "Name each once"]),
    "tuned and decided": ("tune: {run.seed: [1, 2]}\n", [], ["study.tune: run.seed", "Leave it out"]),
    "arm refuses a value": ("tune: {optim.weight_decay: [0.0, 0.1]}\n", [], ["arm ngpt", "weights are never decayed"]),
    "a batch of another budget": (
        "budgets: [5120]\ntune: {train.batch_rows: [8, 12]}\n",
        [],
        ["train.batch_rows=12", "5376 tokens, not 5120 as with 8", "multiples of 768"],
    ),
    "a warm-up longer than a tuned batch's run": (
        "budgets: [20480]\ntune: {train.batch_rows: [8, 32], schedule.warmup_steps: [3, 20]}\n",
        [],
        ["schedule.warmup_steps=20", "train.steps=10"],
    ),
    "comparison's baseline": ("", ["compare.baseline=gtp"], ["compare.baseline=gtp", "did you mean gpt", "Arms: gpt"]),
    "comparison's place": ("", ["compare.out=/dev/null"], ["compare.out=/dev/null", "Name a directory"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_key_value_and_fix(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a mistake that is found after the first run, or whose message does not say where it is."""
    change, arguments, said = MISTAKES[case]
    tree = yaml.safe_load(YAML) | yaml.safe_load(change or "{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    # A dry run, so that the test ends also where the mistake is not found.
    given = [*(["study=small"] if "study=null" not in arguments else []), *arguments, "study.dry_run=true"]
    assert main(["study", *given, *options(tmp_path, yaml.safe_dump(tree, sort_keys=False))]) == 2
    message = capsys.readouterr().err
    assert not [word for word in said if word not in message], message
    assert not (tmp_path / "studies").exists()


def test_text_that_is_not_there_ends_the_study_before_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for key in ("data.path", "data.val_files"):
        (tmp_path / "there.txt").write_text("text")
        paths = {"data.path": tmp_path / "there.txt", key: tmp_path / "gone.txt"}
        given = ["study=small", f"study.root={tmp_path / 'studies'}", "data=local", "tokenizer=bytes"]
        given += [f"{name}={path}" for name, path in paths.items()]
        assert main(["study", *given, "study.dry_run=true", *options(tmp_path)]) == 3
        assert f"{key}={tmp_path / 'gone.txt'}: no such file" in capsys.readouterr().err


def test_a_study_is_started_by_its_verb_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "study=gpt_vs_ngpt", "--cfg", "job"]) == 2
    assert "ngpt-train study study=gpt_vs_ngpt" in capsys.readouterr().err
    assert main(["study", "study=gpt_vs_ngpt", "-m"]) == 2
    assert "--multirun" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main(["study", "study=gpt_vs_ngpt", "study.dry_run=true"]) == 2
    assert "not under torchrun" in capsys.readouterr().err


@pytest.fixture
def begun(tmp_path: Path) -> Study:
    """The small study, with a run."""
    study = study_of(tmp_path)
    write_study(study)
    (study.runs / "gpt-5120-lr0.008-seed0").mkdir(parents=True)
    (study.runs / "gpt-5120-lr0.008-seed0" / "config.yaml").touch()
    return study


def test_a_study_that_has_begun_may_only_grow(tmp_path: Path, begun: Study) -> None:
    """Caught: another study in the directory of a begun study; a refused extension, or a refused layout."""
    assert read_stored(begun.path) == begun

    def asked(*arguments: str, text: str = YAML) -> None:
        study = study_of(tmp_path, *arguments, text=text)
        check_stored(study, Runs(study))

    asked()
    asked("study.budgets=[5120,25600,51200]", "study.seeds=[0,1,2]", "study.max_points=20", "study.jobs=3")
    asked("train.micro_rows=4", "checkpoint.every=3", "logging.wandb.mode=offline")
    asked(text=YAML.replace("ngpt: {", "qk: {model: gpt, model.qk_norm: true}\n  ngpt: {"))
    for change, said in {
        "study.budgets=[5120]": "study.budgets: [5120,25600] -> [5120], without [25600]",
        "study.seeds=[1,0]": "study.seeds: [0,1] -> [1,0]",
        "study.metric=bits_per_byte": "study.metric: loss -> bits_per_byte",
        "study.baseline=ngpt": "study.baseline: gpt -> ngpt",
        "study.max_points=3": "study.max_points: 9 -> 3",
        "eval.rows=32": "arm gpt: eval.rows: 64 -> 32",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            asked(change)
    with pytest.raises(ConfigError, match=r"arm ngpt: model.update: lerp -> slerp"):
        asked(text=YAML.replace("model: ngpt", "model: ngpt, model.update: slerp"))
    with pytest.raises(ConfigError, match=r"study.arms: without ngpt"):
        asked(text=YAML.replace("  ngpt: {model: ngpt}\n", ""))
    shutil.rmtree(begun.runs)
    asked("eval.rows=32")  # its first runs could not begin


def test_a_begun_study_keeps_its_grid_or_refines_it(tmp_path: Path, begun: Study) -> None:
    """Caught: new runs in a study that was complete before rates were refined; refining that cannot be asked for, or
    that is given up; a definition of an older version that is not read."""
    path = begun.path / "study.yaml"
    refused = study_of(tmp_path, "study.refine=false")
    with pytest.raises(ConfigError, match=re.escape("study.refine: true -> false")):
        check_stored(refused, Runs(refused))
    path.write_text(path.read_text().replace("refine: true\n", ""))
    assert [study.refine for study in (begun, read_stored(begun.path), study_of(tmp_path))] == [True, False, False]
    for asked in (study_of(tmp_path), study_of(tmp_path, "study.refine=true")):
        check_stored(asked, Runs(asked))


def test_a_definition_that_was_edited_by_hand(begun: Study) -> None:
    """Caught: an edit of study.yaml that nobody notices, or that ends with a traceback; a study that cannot begin
    because its first write of study.yaml was cut, as on a full disk."""
    path, runs = begun.path / "study.yaml", Runs(begun)
    text = path.read_text()
    for old, new, said in (
        ("- model=gpt", "- model=ngpt", "arm gpt: model.name: ngpt -> gpt"),
        ("- model=gpt", "- model=nothing", "arm gpt: its configuration: (cannot be composed any more)"),
        ("optim.lr: 2.0", "optim.lr: 4.0", "study.tune: {optim.lr: 4.0} -> {optim.lr: 2.0}"),
        ("confidence: 0.95", "confidence: .nan", "study.confidence: nan -> 0.95"),
        ("- 5120", "- five", "study.yaml is missing or damaged: invalid literal for int()"),
        (text, "arms: [", "study.yaml is missing or damaged"),
        (text, "", "Restore it, or choose another study.name"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises((ConfigError, DataError), match=re.escape(said)):
            check_stored(begun, runs)
    shutil.rmtree(begun.runs)
    path.rename(begun.path / ".study.yaml.partial")
    check_stored(begun, runs)
    (begun.path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not the directory of a study"):
        check_stored(begun, runs)


def test_only_a_studys_own_arguments_make_its_config() -> None:
    given = ["study=x", " study.jobs=2", "compare.out=y", "model=gpt", "studyx.y=1", "run.name=study"]
    assert arguments_of("study", given) == given[:3]
    assert arguments_of("train", given) == given
