"""The referee names every difference between arms, with its kind and size."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.config.architectures import architectures
from ngpt_train.config.schema import schema_keys
from ngpt_train.config.validate import Key
from ngpt_train.core.errors import DataError
from ngpt_train.study.compare.compared_keys import (
    HARDWARE,
    HARMLESS,
    PLACES_OF_ROWS,
    PLACES_OF_TEXT,
    covers,
    without_effect,
)
from ngpt_train.study.compare.given_runs import check_comparable
from ngpt_train.study.compare.referee import examine
from ngpt_train.study.compare.runs import Run, read_run
from tests.unit.study.planted import FACTS, config_of, plant

GPT, NGPT = config_of("model=gpt"), config_of("model=ngpt")
MUON = ("optim.name=muon", "optim.weight_decay=0")
KEYS = [key for name, key in schema_keys(architectures()["ngpt"]).items() if name != "model.name"]
IN_THE_RECORDS = ("train.steps", "train.batch_rows", "model.context")  # what `plant` writes depends on these
# Reviewed: these are not looked at. Whoever adds a section to HARMLESS adds it here, and says why there.
NOT_LOOKED_AT = {
    *("logging", "checkpoint", "generate", "evaluate", "plan", "doctor"),
    *("study", "compare", "audit", "transfer", "analyze", "probe", "export", "import"),
    *("run.name", "run.root", "run.resume", "run.resume_step", "run.overwrite", "run.max_time", "run.allow_change"),
    *("scale.name", "optim.lr_table", "optim.lr_source", "train.profile", "train.stop_at"),
    *("model.init_table", "eval.every", "eval.tasks", "eval.tasks_every", "eval.tasks_path"),
    *("data.out", "data.cache", "data.cache_gb", "data.text_gb", "data.workers", "data.prepare_workers"),
    *("data.prefetch", "data.fetch_minutes"),
    *("parallel.timeout", "parallel.hang_seconds", "parallel.check_replicas"),
}


def another(key: Key, value: Any) -> Any:
    """Another value that the key takes."""
    if key.choices and (others := [x for x in key.choices if x not in (value, "auto")]):
        return others[-1]
    if isinstance(value, bool) or bool in key.types:
        return value is not True
    if key.name == "run.seed":
        return 7
    if list in key.types:
        return [*(value or []), 1.5 if key.items is float else 7 if key.items is int else "a"]
    if isinstance(value, (int, float)):
        return type(value)(value * 2 + 1) if isinstance(value, int) else value / 2 + 0.001
    if int in key.types or float in key.types:
        return 7
    return {"a": 1} if dict in key.types else "another"


def arms(root: Path, first: dict[str, Any], second: dict[str, Any], **of_second: Any) -> dict[str, list[Run]]:
    """Two arms with two seeds each."""
    found: dict[str, list[Run]] = {}
    for name, config, given in (("first", first, {}), ("second", second, of_second)):
        found[name] = [
            plant(root / f"{name}{seed}", config | {"run.seed": config["run.seed"] + seed}, **given) for seed in (0, 1)
        ]
    return found


def decayed(root: Path, decays: dict[int, float], **facts: Any) -> list[Run]:
    """An arm's runs, by their steps with the weight decay. facts: of all but the shortest."""
    configs = [GPT | {"train.steps": steps, "optim.weight_decay": decay} for steps, decay in decays.items()]
    return [plant(root / str(k), config, facts=FACTS | (facts if k else {})) for k, config in enumerate(configs)]


def by_key(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({(x["key"], *x["arms"]) for x in entries}) == len(entries), "a difference is named twice"
    return {entry["key"]: entry for entry in entries}


def test_the_harmless_keys_are_reviewed() -> None:
    assert set(HARMLESS) == NOT_LOOKED_AT
    assert all(HARMLESS.values())


@pytest.fixture(scope="module")
def first_arm(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return arms(tmp_path_factory.mktemp("arms"), NGPT, NGPT)["first"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_difference_in_any_key_is_named(key: Key, first_arm: list[Run], tmp_path: Path) -> None:
    """Caught: a key that nobody thought of; a confound that counts as the recipe's; values without their arms."""
    value = another(key, NGPT.get(key.name))
    values = [value + run.seed if key.name == "run.seed" else value for run in first_arm]
    configs = [{**run.config, key.name: own} for run, own in zip(first_arm, values, strict=True)]
    if key.name in IN_THE_RECORDS:
        second = [plant(tmp_path / str(k), config) for k, config in enumerate(configs)]
    else:
        second = [replace(run, config=config) for run, config in zip(first_arm, configs, strict=True)]
    found = by_key(examine({"first": first_arm, "second": second}, under_test=["model.name"]))
    if covers(HARMLESS, key.name):
        assert key.name not in found
        return
    entry = found[key.name]
    assert entry["arms"] == ["first", "second"]
    assert entry["values"] == ([[0, 1], [7, 8]] if key.name == "run.seed" else [NGPT[key.name], value])
    same_by_evidence = key.name in PLACES_OF_TEXT | PLACES_OF_ROWS
    assert entry["kind"] == ("follows" if same_by_evidence or covers(HARDWARE, key.name) else "confound"), entry
    numbers = [x for x in entry["values"] if type(x) in (int, float) and x > 0]
    assert entry["size"] == (pytest.approx(max(numbers) / min(numbers)) if len(numbers) == 2 else None)


def test_what_architecture_and_recipe_bring_follows(tmp_path: Path) -> None:
    """Caught: nGPT's Adam without decay as a confound; the list of all options that GPT lacks."""
    found = by_key(examine(arms(tmp_path, GPT, NGPT, facts=FACTS | {"n_params": 720_000}), under_test=["model"]))
    kinds = {key: entry["kind"] for key, entry in found.items()}
    assert kinds["model.name"] == "under_test"
    assert {"optim.name", "optim.weight_decay", "optim.lr", "schedule.warmup_steps", "n_params"} <= kinds.keys()
    assert {kind for key, kind in kinds.items() if key != "model.name"} == {"follows"}
    assert found["optim.weight_decay"]["values"] == [0.1, 0]
    assert found["n_params"]["size"] == pytest.approx(720_000 / 660_864)
    assert not [key for key in found if key.startswith("model.s_qk")]


def test_a_confound_says_what_the_recipe_brings(tmp_path: Path) -> None:
    found = by_key(examine(arms(tmp_path, GPT, NGPT | {"optim.betas": [0.9, 0.99]}), under_test=["model"]))
    assert found["optim.betas"]["note"] == "the recipe of second brings [0.9,0.95]"


def test_identical_arms_do_not_differ(tmp_path: Path) -> None:
    assert examine(arms(tmp_path, GPT, GPT)) == []


def test_seeds_are_known_by_the_names_of_directories(tmp_path: Path) -> None:
    """In configs without run.seed. Caught: rows of two seeds that are compared as those of one."""
    config = {key: value for key, value in GPT.items() if key != "run.seed"}
    found = {
        arm: [plant(tmp_path / f"{arm}-seed{seed}", config, order=(f"of {seed}",) * 2) for seed in (0, 1)]
        for arm in ("first", "second")
    }
    assert [run.seed for run in found["first"]] == [0, 1]
    assert examine(found) == []


def test_without_names_the_architecture_is_the_question(tmp_path: Path) -> None:
    """Caught: tied embeddings beside another architecture as its option; an option of its own as a confound."""
    other = NGPT | {"model.tied_embeddings": True, "model.update": "slerp"}
    kinds = {key: entry["kind"] for key, entry in by_key(examine(arms(tmp_path, GPT, other))).items()}
    assert kinds["model.name"] == kinds["model.update"] == "under_test"
    assert kinds["model.tied_embeddings"] == "confound"


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("model.qk_norm", True, "under_test"),
        ("model.tied_embeddings", True, "under_test"),
        ("optim.weight_decay", 0.2, "under_test"),
        ("train.precision", "bf16", "confound"),
        ("model.d_model", 128, "confound"),
    ],
)
def test_without_another_architecture(tmp_path: Path, key: str, value: Any, kind: str) -> None:
    (entry, *_) = [x for x in examine(arms(tmp_path, GPT, GPT | {key: value})) if x["key"] == key]
    assert entry["kind"] == kind


def test_code_machine_and_data(tmp_path: Path) -> None:
    confounds = {"git_commit": "2" * 40, "device": "NVIDIA H100", "data_fingerprint": "e" * 64, "tokenizer": "gpt2"}
    confounds |= {"versions": FACTS["versions"] | {"torch": "2.14.0"}, "a fact of a later version": 1}
    follow = {"world_size": 4, "parallel": "ddp"}
    found = by_key(examine(arms(tmp_path, GPT, GPT, facts={**FACTS, **confounds, **follow})))
    kinds = {key.removesuffix(".torch"): entry["kind"] for key, entry in found.items()}
    assert kinds == dict.fromkeys(confounds, "confound") | dict.fromkeys(follow, "follows")


def test_ranks_matter_to_norms_over_the_batch(tmp_path: Path) -> None:
    config = config_of("model=powernorm")
    (entry,) = examine(arms(tmp_path, config, config, facts=FACTS | {"world_size": 4}))
    assert (entry["key"], entry["kind"], entry["size"]) == ("world_size", "confound", 4.0)


def test_records_that_differ(tmp_path: Path) -> None:
    """Caught: rows compared at other tokens; clipping that is looked at as a key alone."""
    found = by_key(examine(arms(tmp_path, GPT, GPT, order=("rows", "others"), clipped=0.1)))
    assert found["data_hash"]["values"] == ["rows 25600", "others 25600"]
    assert found["data_hash"]["kind"] == "confound"
    assert "25,600 tokens" in found["data_hash"]["note"]
    assert found["clipped_share"]["values"] == [0.5, 0.1]
    assert found["clipped_share"]["size"] == pytest.approx(5)


def test_clipped_steps_of_the_runs_that_are_compared(tmp_path: Path) -> None:
    """Caught: learning rates that only the tuning tried have a say; of equal shares one alone counts."""
    runs = [plant(tmp_path / str(k), GPT, clipped=clipped) for k, clipped in enumerate([0.2, 0.2, 0.5, 1.0])]
    both = {"a": runs[:3], "b": runs[3:]}
    assert by_key(examine(both))["clipped_share"]["values"] == [0.3, 1.0]
    best = {"a": runs[:2], "b": runs[3:]}
    assert by_key(examine(both, best=best))["clipped_share"]["values"] == [0.2, 1.0]


def test_runs_of_one_arm_that_differ(tmp_path: Path) -> None:
    """Caught: an arm whose first run stands for all; the same seed on other rows; a start whose steps are gone."""
    again = {**FACTS, "git_commit": "2" * 40}
    runs = [
        plant(tmp_path / "a", GPT),
        plant(tmp_path / "b", GPT | {"optim.weight_decay": 0.3}, order=("rows", "others")),
        plant(tmp_path / "c", GPT | {"run.seed": 1}, later=[{**again, "step": 25}, {**FACTS, "step": 25}]),
    ]
    found = by_key(examine({"gpt": runs}))
    assert set(found) == {"optim.weight_decay", "data_hash"}
    assert found["optim.weight_decay"]["values"] == [0.1, 0.3]
    assert found["data_hash"]["arms"] == ["gpt"]
    runs.append(plant(tmp_path / "d", GPT | {"run.seed": 2}, later=[{**again, "step": 25}]))
    assert by_key(examine({"gpt": runs}))["git_commit"]["values"] == ["1" * 40, "2" * 40]


def test_budgets_are_compared_with_equal_budgets(tmp_path: Path) -> None:
    """Caught: a baseline with a longer run as a confound; a value that two arms have at other budgets."""
    one = decayed(tmp_path / "one", {50: 0.1, 100: 0.1})
    more = decayed(tmp_path / "more", {50: 0.1, 100: 0.1, 200: 0.1})
    assert examine({"one": one, "more": more}, under_test=["model"]) == []
    x, y = decayed(tmp_path / "x", {50: 0.1, 100: 0.2}), decayed(tmp_path / "y", {50: 0.2, 100: 0.1})
    crossed = examine({"one": x, "more": y}, under_test=["model"])
    assert {tuple(x["arms"]) for x in crossed if x["key"] == "optim.weight_decay"} >= {("one", "more")}
    (apart, *_) = examine({"one": one[:1], "more": more[2:]}, under_test=["model"])
    assert (apart["key"], apart["kind"], apart["size"]) == ("train.steps", "confound", 4.0)


def test_a_confound_at_a_budget_that_some_arms_lack(tmp_path: Path) -> None:
    """Caught: a third arm without the larger budgets, which hides differences of the other two there, at the budget of
    their verdict; another value at a further budget of the baseline, which is part of the fit."""
    short, one = decayed(tmp_path / "short", {50: 0.1}), decayed(tmp_path / "one", {50: 0.1, 100: 0.1})
    other = decayed(tmp_path / "other", {50: 0.1, 100: 0.3}, git_commit="2" * 40)
    found = examine({"one": one, "short": short, "other": other}, under_test=["model"])
    between = {x["key"]: x["kind"] for x in found if len(x["arms"]) == 3}
    assert between == {"optim.weight_decay": "confound", "git_commit": "confound"}
    longer = decayed(tmp_path / "longer", {50: 0.1, 100: 0.1, 200: 0.3})
    (within,) = examine({"one": one, "longer": longer}, under_test=["model"])
    assert (within["arms"], within["key"], within["values"]) == (["longer"], "optim.weight_decay", [0.1, 0.3])
    silent = decayed(tmp_path / "silent", {50: 0.1, 100: 0.1}, n_params=None)
    larger = [plant(tmp_path / "larger", GPT | {"model.d_mlp": 300}, facts=FACTS | {"n_params": 700_000})]
    sizes = by_key(examine({"silent": silent, "larger": larger}, under_test=["model"]))["n_params"]
    assert sizes["values"] == [FACTS["n_params"], 700_000]


def test_tuned_keys(tmp_path: Path) -> None:
    """Caught: tuned rates as confounds; a tuned arm beside an untuned one."""
    tuned = [plant(tmp_path / f"a{lr}", GPT | {"optim.lr": lr}) for lr in (1e-3, 2e-3, 4e-3)]
    other = [plant(tmp_path / f"b{lr}", GPT | {"optim.lr": lr}) for lr in (4e-3, 8e-3, 16e-3)]
    (entry,) = examine({"a": tuned, "b": other}, {"a": ["optim.lr"], "b": ["optim.lr"]}, ["model"])
    assert (entry["key"], entry["kind"]) == ("optim.lr", "follows")
    (entry,) = examine({"a": tuned, "b": other[:1]}, {"a": ["optim.lr"]}, ["model"])
    assert entry["kind"] == "confound"
    assert "not in b" in entry["note"]


@pytest.mark.parametrize(
    ("key", "value", "other", "kind"),
    [
        ("model.init.hidden", 0.04, ["model=ngpt"], "follows"),
        ("model.init.hidden", 0.04, ["model=ngpt", "model.constraint=none"], "confound"),
        ("optim.momentum", 0.4, ["model=gpt"], "follows"),
        ("optim.groups.embedding", 0.1, ["model=gpt"], "confound"),
    ],
)
def test_a_tuned_key_without_an_effect_in_the_other_arm(
    tmp_path: Path, key: str, value: float, other: list[str], kind: str
) -> None:
    """Caught: a confound of a key that the other arm cannot be tuned for; a key that is off there for no confound."""
    tuned = [plant(tmp_path / str(k), config_of("model=gpt", f"{key}={k * value}", *MUON)) for k in (1, 2)]
    arms = {"a": tuned, "b": [plant(tmp_path / "b", config_of(*other))]}
    found = by_key(examine(arms, {"a": [key]}, ["model.name", "model.constraint", "optim.name"]))
    assert found[key]["kind"] == kind


def test_values_that_the_schema_refuses_have_an_effect() -> None:
    """Caught: a traceback for a config that no `train` of ours would take."""
    config = {"model.name": "ngpt", "model.s_z.init": [1, 2], "optim.name": ["a"], "model.constraint": "none"}
    assert "model.init.hidden" not in without_effect(config)
    assert "model.init.hidden" in without_effect(config | {"model.constraint": ["none"]})


def test_values_that_were_tried_and_not_taken(tmp_path: Path) -> None:
    """Caught: the tuned keys of a study among its confounds, with the steps and the warm-up that follow a batch."""
    steps = int(GPT["train.steps"])
    more = {"train.batch_rows": 2 * GPT["train.batch_rows"], "train.steps": steps // 2, "schedule.warmup_steps": 1}
    taken = {arm: [plant(tmp_path / arm, GPT)] for arm in ("a", "b")}
    tried = [plant(tmp_path / "batch", GPT | more), plant(tmp_path / "decay", GPT | {"optim.weight_decay": 0.3})]
    runs = {"a": [*taken["a"], *tried], "b": taken["b"]}
    tuned = {"a": ["train.batch_rows", "optim.weight_decay"]}
    assert examine(runs, tuned, ["model"], taken) == []
    found = by_key(examine(runs, {"a": tuned["a"][:1]}, ["model"], taken))
    assert found["optim.weight_decay"]["kind"] == "confound"
    chosen = by_key(examine(runs, tuned, ["model"], taken | {"a": tried[:1]}))
    kinds = {"train.batch_rows": "confound", "train.steps": "follows", "tokens_per_step": "confound"}
    assert {key: chosen[key]["kind"] for key in kinds} == kinds


def test_a_run_that_went_back(tmp_path: Path) -> None:
    """Caught: a run of an arm that went on without its bad rows, beside arms whose seeds it does not share."""
    runs = arms(tmp_path, GPT, GPT | {"run.seed": 0})
    noted = tmp_path / "second1/run.json"
    noted.write_text(json.dumps(json.loads(noted.read_text()) | {"rollbacks": [{"number": 1, "step": 30}]}))
    runs["second"][1] = read_run(tmp_path / "second1")
    found = {tuple(x["arms"]): x for x in examine(runs) if x["key"] == "rollbacks"}
    assert [found[both]["values"] for both in (("second",), ("first", "second"))] == [[0, 1], [0, [0, 1]]]
    assert {x["kind"] for x in found.values()} == {"confound"}


def test_partial_configs(tmp_path: Path) -> None:
    """Caught: a config without all keys that ends in a traceback, or whose missing keys are differences."""
    least = {"model.name": "gpt", "train.steps": 10, "run.seed": 0}
    found = examine({"a": [plant(tmp_path / "a", least)], "b": [plant(tmp_path / "b", least | {"optim.eps": 1e-6})]})
    assert [(x["key"], x["values"]) for x in found] == [("optim.eps", [1e-8, 1e-6])]
    third = [plant(tmp_path / "c", least | {"model.name": "of a plug-in", "optim.lr": 0.1})]
    kinds = {x["key"]: x["kind"] for x in examine({"a": [plant(tmp_path / "d", least)], "c": third})}
    assert kinds == {"model.name": "under_test", "optim.lr": "confound"}


def test_three_arms(tmp_path: Path) -> None:
    configs = {"a": GPT, "b": GPT, "c": GPT | {"train.batch_rows": 16}}
    runs = {name: [plant(tmp_path / name, config)] for name, config in configs.items()}
    found = by_key(examine(runs, under_test=["model"]))
    assert found["tokens_per_step"]["arms"] == ["a", "b", "c"]
    assert found["tokens_per_step"]["values"] == [512, 512, 1024]
    assert found["tokens_per_step"]["note"] == "through train.batch_rows"


def test_what_can_be_compared(tmp_path: Path) -> None:
    """Caught: losses on other rows; losses per token of other tokenizers; bits per byte of other text."""
    bpe = FACTS | {"tokenizer_fingerprint": "b" * 64}
    run = plant(tmp_path / "run", GPT)
    assert check_comparable([run, plant(tmp_path / "same", NGPT)]) == "loss"
    other_rows = plant(tmp_path / "rows", GPT | {"eval.rows": 8}, rows="0" * 16)
    assert check_comparable([run, other_rows]) == "loss"
    confounds = {x["key"]: x["kind"] for x in examine({"a": [run], "b": [other_rows]})}
    assert confounds == {"eval.rows": "confound", "rows_hash": "confound"}
    other_data = FACTS | {"data_fingerprint": "e" * 64}
    with pytest.raises(DataError, match=r"data cannot be compared with.*other text: rows_hash 0000"):
        check_comparable([run, plant(tmp_path / "data", GPT, facts=other_data, rows="0" * 16)])
    assert check_comparable([run, plant(tmp_path / "training text", GPT, facts=other_data)]) == "loss"
    other_tokenizer = plant(tmp_path / "tokenizer", GPT, facts=bpe, rows="0" * 16)
    assert check_comparable([run, other_tokenizer]) == "bits_per_byte"
    unknown = {name: fact for name, fact in FACTS.items() if name != "tokenizer_fingerprint"}
    words = plant(tmp_path / "words", GPT | {"tokenizer.kind": "words"}, facts=unknown, rows="0" * 16)
    assert check_comparable([run, words]) == "bits_per_byte"
    same_tokens = plant(tmp_path / "same tokens", GPT | {"tokenizer.kind": "words"}, facts=unknown)
    assert check_comparable([run, same_tokens]) == "loss"
    silent = plant(tmp_path / "silent", GPT, facts=bpe, rows="0" * 16, bits_per_byte=None)
    with pytest.raises(DataError, match=r"silent has another tokenizer.*no bits_per_byte"):
        check_comparable([run, silent])
    text = {"data.kind": "local", "data.path": "/other.txt"}
    with pytest.raises(DataError, match=r"other text, by data\.kind, data\.path"):
        check_comparable([run, plant(tmp_path / "text", GPT | text, facts=bpe, rows="0" * 16)])
    continuing = plant(tmp_path / "objective", GPT | {"data.objective": "prefix_continuation"}, rows="0" * 16)
    with pytest.raises(DataError, match="continues the beginning"):
        check_comparable([run, continuing])
    (tmp_path / "run/metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no run has been validated"):
        check_comparable([read_run(tmp_path / "run")])


def test_what_explains_a_size(tmp_path: Path) -> None:
    """Caught: parameters of a switch that no key seems to explain; a wider MLP that passes for the architecture's."""
    more = FACTS | {"n_params": 700_000}
    switched = by_key(examine(arms(tmp_path / "a", GPT, GPT | {"model.qk_norm": True}, facts=more)))
    assert (switched["n_params"]["kind"], switched["n_params"]["note"]) == ("follows", "from model.qk_norm")
    wider = by_key(examine(arms(tmp_path / "b", GPT, NGPT | {"model.d_mlp": 300}, facts=more), under_test=["model"]))
    assert (wider["n_params"]["kind"], wider["n_params"]["note"]) == ("confound", "through model.d_mlp")
    turned = by_key(
        examine(arms(tmp_path / "c", GPT, NGPT | {"model.rope_base": 5e5}, facts=more), under_test=["model"])
    )
    assert turned["n_params"]["kind"] == "follows"
    alone = by_key(examine(arms(tmp_path / "d", GPT, GPT | {"optim.weight_decay": 0.2}, facts=more)))
    assert (alone["n_params"]["kind"], alone["n_params"]["note"]) == ("confound", "no key of the config explains it")


@pytest.mark.parametrize(
    ("steps", "rows", "kind", "note"),
    [
        (100, 8, None, None),
        (50, 16, "follows", "as many tokens, in steps of another size"),
        (101, 8, "confound", "up to 1 % more tokens at what counts as one budget"),
        (200, 8, "confound", "first and second share no budget; losses at one budget are no comparison"),
    ],
)
def test_steps_and_budgets(tmp_path: Path, steps: int, rows: int, kind: str | None, note: str | None) -> None:
    """Caught: arms of one budget that are said to share none, because their steps differ."""
    one, other = (GPT | {"train.steps": n, "train.batch_rows": size} for n, size in ((100, 8), (steps, rows)))
    found = by_key(examine(arms(tmp_path, one, other), under_test=["model"])).get("train.steps")
    assert (found and found["kind"], found and found["note"]) == (kind, note)


def test_values_that_differ_at_one_budget(tmp_path: Path) -> None:
    """Caught: the same seeds on both sides of a confound, of arms that lack one at one budget."""
    runs = {
        arm: [
            plant(tmp_path / f"{arm}{steps}-{seed}", GPT | {"train.steps": steps, "run.seed": seed})
            for steps, seed in points
        ]
        for arm, points in (("one", [(50, 0), (50, 1), (100, 0), (100, 1)]), ("more", [(50, 0), (50, 1), (100, 0)]))
    }
    (found,) = examine(runs)
    assert (found["key"], found["values"]) == ("run.seed", [[0, 1], 0])
    assert found["note"].startswith("at 51,200 tokens; ")


def test_a_resume_with_other_keys(tmp_path: Path) -> None:
    """Caught: a change that was allowed at a resume as something that run.json does not say."""
    resumed = [{**FACTS, "step": 25, "changed": [{"key": "optim.clip_norm", "from": 1, "to": 2}]}]
    found = examine({"a": [plant(tmp_path / "a", GPT)], "b": [plant(tmp_path / "b", GPT, later=resumed)]})
    assert [(x["key"], x["values"], x["kind"]) for x in found] == [
        ("allowed_changes", [[], ["optim.clip_norm"]], "confound")
    ]
