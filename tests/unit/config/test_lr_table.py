"""optim.lr_table: which entry counts, when it is an extrapolation, what a table may hold. schedule.final_share: the end
of the schedule as a share of a rate that is tuned, or from a table."""

import math
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.config import Config, ConfigError, list_experiments, load_config
from ngpt_train.config.compose import compose
from ngpt_train.config.sections.lr_table import look_up, problem_of
from ngpt_train.config.stored import check_resume, to_dict, with_first_values
from ngpt_train.config.yaml_files import config_dir

A, B = {"tokens": 1e9, "lr": 3.0, "source": "paper A"}, {"tokens": 1e11, "lr": 1.0, "source": "paper B"}
GUESS = {"tokens": 1e13, "lr": 0.5, "source": "a guess", "extrapolation": True}
ROW: dict[int, Any] = {64: [{"lr": 7.0}], 256: [A, B, GUESS]}


def found(context: int, tokens: float, row: dict[int, Any] = ROW, steps: int = 100) -> tuple[float, str]:
    return look_up(row, "gpt", context, {"tokens": int(tokens), "steps": steps})


def test_the_nearest_budget_by_its_logarithm() -> None:
    """Caught: the nearest by tokens, or the next smaller one."""
    assert found(256, 0.99e10)[0] == 3.0
    assert found(256, 1.01e10)[0] == 1.0
    assert found(256, 1e10)[0] == 1.0  # as near: the larger
    assert [found(256, tokens)[0] for tokens in (1, 1e9, 1e11, 1e13, 1e20)] == [3.0, 3.0, 1.0, 0.5, 0.5]
    by_steps = {256: [{"steps": 100, "lr": 3.0}, {"steps": 10_000, "lr": 1.0}]}
    assert [found(256, 1, by_steps, steps)[0] for steps in (100, 900, 1100)] == [3.0, 3.0, 1.0]


def test_what_is_an_extrapolation() -> None:
    """Another context, or a budget beyond all entries by more than a factor of 2. Caught: one that is not said."""
    paper_a = "paper A (1 billion tokens at context 256)"
    for context, tokens, said in (
        *((256, tokens, paper_a) for tokens in (0.51e9, 1e9, 5e9)),  # the last is between two entries
        (64, 1e9, "optim.lr_table (context 64)"),
        (256, 0.49e9, f"an extrapolation: {paper_a}; this run has 490 million tokens at context 256"),
        (512, 1e9, f"an extrapolation: {paper_a}; this run has 1 billion tokens at context 512"),
        (32, 1e9, "an extrapolation: optim.lr_table (context 64); this run has context 32"),
        (256, 1e13, "an extrapolation: a guess (1e+04 billion tokens at context 256)"),
    ):
        assert found(context, tokens)[1] == said


def test_an_entry_of_another_architecture() -> None:
    """Caught: another architecture's rate that is taken for the run's own."""
    row = {256: [A | {"model": "ngpt"}, B | {"model": "gpt"}]}
    assert found(256, 1e11, row)[1] == "paper B (100 billion tokens at context 256)"
    assert found(256, 1e9, row)[1] == "an extrapolation: paper A (1 billion tokens at context 256); it is ngpt's"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"tiny": {256: "fast"}}, "tiny, 256: must be a number > 0"),
        ({"tiny": {256: 0}}, "tiny, 256: must be a number > 0"),
        ({"tiny": {256: math.inf}}, "tiny, 256: must be a number > 0"),
        ({"tiny": {"256": 1}}, "tiny, '256': a context is an integer > 0"),
        ({"tiny": 1e-3}, "tiny: must be the name of a scale, and then {CONTEXT: LR}"),
        ({"tiny": {256: []}}, "tiny, 256: the list has no entry"),
        ({"tiny": {256: [1e-3]}}, "tiny, 256, entry 1: must be a mapping with lr"),
        ({"tiny": {256: [A | {"token": 5}]}}, "tiny, 256, entry 1: token is none of lr, tokens, steps"),
        ({"tiny": {256: [A | {"tokens": "many"}]}}, "tiny, 256, entry 1: tokens must be a number > 0"),
        ({"tiny": {256: [A | {"source": ""}]}}, "tiny, 256, entry 1: source must be text"),
        ({"tiny": {256: [A | {"extrapolation": "no"}]}}, "tiny, 256, entry 1: extrapolation must be true or false"),
        ({"tiny": {256: [A | {"steps": 5}]}}, "tiny, 256: all entries have tokens, or all have steps"),
        ({"tiny": {256: [A, {"lr": 1, "steps": 5}]}}, "tiny, 256: all entries have tokens, or all have steps"),
        ({"tiny": {256: [B, A, B]}}, "tiny, 256, entry 3: an entry before it has tokens: 1e+11 as well"),
        ({"tiny": {256: [{"lr": 1}, {"lr": 2}]}}, "tiny, 256: all entries have tokens, or all have steps"),
    ],
)
def test_a_faulty_table(table: dict[str, Any], says: str) -> None:
    problem = problem_of(table)
    assert problem is not None
    assert problem.startswith(says)


def test_good_tables() -> None:
    assert problem_of({}) is None
    assert problem_of({"tiny": {64: 1, 256: [A, B, GUESS | {"model": "gpt"}], 512: [{"lr": 1e-3}]}}) is None


def test_a_recipe_of_ones_own_replaces_entries(tmp_path: Path) -> None:
    """Caught: entries merged field by field, so that a rate has another's source."""
    (tmp_path / "recipe").mkdir()
    recipe = tmp_path / "recipe" / "mine.yaml"

    def lr(table: str, *arguments: str) -> tuple[Any, str]:
        recipe.write_text(f"# @package _global_\ndefaults: [ngpt]\noptim: {{lr_table: {{tiny: {table}}}}}\n")
        optim = load_config(["model=ngpt", "recipe=mine", *arguments], str(tmp_path)).optim
        return optim.lr, optim.lr_source

    assert lr("{256: [{lr: 0.5, tokens: 1.2e6}]}") == (0.5, "optim.lr_table (1.2 million tokens at context 256)")
    assert lr("{256: 0.5}") == (0.5, "optim.lr_table (context 256)")
    assert lr("{512: 0.5}")[0] == 2e-2
    assert lr("{512: 0.5}", "model.context=512")[0] == 0.5


def test_the_small_scales_are_as_measured() -> None:
    """docs/benchmarks/initialisation.md, at the scales' own budgets. Caught: a default run that changes."""
    rates = {
        "gpt": (8e-3, 8e-3),
        "ngpt": (2e-2, 2e-2),
        "normformer": (8e-3, 8e-3),
        "powernorm": (8e-3, 8e-3),
        "gpt_encoder_decoder": (4e-3, 8e-3),
        "ntransformer": (1e-2, 2e-2),
    }
    for model, expected in rates.items():
        for scale, lr in zip(("debug", "tiny"), expected, strict=True):
            optim = load_config([f"model={model}", f"scale={scale}"]).optim
            assert optim.lr == lr
            sources = ("docs/benchmarks/initialisation.md", "docs/studies/gpt_vs_ngpt")
            assert any(source in optim.lr_source for source in sources)


def test_recipes_have_rates_of_matrix_optimizers_at_debug() -> None:
    for model in ("gpt", "ngpt"):
        for name in ("muon", "normuon", "adamh", "muonh"):
            optim = load_config([f"model={model}", "scale=debug", f"optim.name={name}", "optim.weight_decay=0"]).optim
            assert optim.lr_source == "our sweep, docs/benchmarks/lr_sweep.md (25.6 thousand tokens at context 64)"
            assert float(optim.lr) >= 2e-2


def test_learning_rates_of_the_ngpt_paper() -> None:
    """A.6 and figure 7: lower for longer runs, and within the ranges that were tried."""
    tried = {1024: 3e-3, 4096: 5e-3, 8192: 6e-3}
    for model in ("gpt", "ngpt"):
        for scale in ("0.5b", "1b"):
            table = load_config([f"model={model}"]).optim.lr_table[scale]
            for context, highest in tried.items():
                rates = [entry["lr"] for entry in sorted(table[context], key=lambda entry: entry["tokens"])]
                assert rates == sorted(rates, reverse=True)
                assert all(1e-3 <= rate <= highest for rate in rates)
    assert load_config(["model=ngpt", "scale=0.5b"]).optim.lr == 1e-3  # A.8: 100,000 steps
    longest = load_config(["model=gpt", "scale=0.5b", "train.steps=954000"]).optim
    assert "an extrapolation: " in longest.lr_source
    assert "500 billion tokens" in longest.lr_source


def test_every_entry_has_a_source_and_its_model() -> None:
    """Of every recipe, also a new one: who found the rate, how, and for which architecture. Caught: an architecture
    that takes another's rate at a scale without a word."""
    names = [path.stem for path in (config_dir() / "recipe").glob("*.yaml")]
    tables = {name: compose([f"recipe={name}"]).config.optim.lr_table for name in names}
    for name, table in tables.items():
        for scale, row in table.items():
            for entries in row.values():
                assert all(entry["source"] and entry["model"] for entry in entries), (name, scale)
    for scale in ("debug", "tiny", "8m"):
        source = load_config(["model=composed", f"scale={scale}"]).optim.lr_source
        assert source.startswith("an extrapolation: "), scale
        assert "; it is gpt's" in source, scale


def test_a_rate_that_is_set_is_from_nowhere() -> None:
    """Set by the user, or by a row of a paper's table: the recipe's table has no part in it."""
    assert load_config(["model=ngpt", "optim.lr=2e-2"]).optim.lr_source == ""
    row = next(name for name in list_experiments() if name.startswith("paper/ngpt_table4/"))
    assert load_config([f"experiment={row}"]).optim.lr_source == ""  # the table sets optim.lr


def run(*changes: str) -> Config:
    arguments = {"model": "ngpt", "scale": "0.5b", "train.steps": "10000"} | dict(c.split("=", 1) for c in changes)
    return load_config([f"{name}={value}" for name, value in arguments.items()])


def test_a_run_that_grows_keeps_its_rate() -> None:
    """Caught: a resume with more steps that is refused, or goes on at another rate, because the table has another."""
    stored, longer = run(), run("train.steps=100000")
    assert (stored.optim.lr, longer.optim.lr) == (2.5e-3, 1e-3)
    assert to_dict(stored)["optim"]["lr_table"]["0.5b"][1024][0]["lr"] == 2.5e-3  # the table is stored
    check_resume(stored, longer)
    grown = with_first_values(longer, stored)
    assert (grown.optim.lr, grown.optim.lr_source) == (2.5e-3, stored.optim.lr_source)
    check_resume(grown, run("train.steps=200000"))  # and once more


@pytest.mark.parametrize(("stored", "new"), [([], ["optim.lr=1e-3"]), (["optim.lr=5e-3"], [])])
def test_a_rate_that_was_asked_for_does_not_change(stored: list[str], new: list[str]) -> None:
    """Caught: a resume that changes the rate without a word, to a number or to the table's."""
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.00(25|5) -> 0\.00"):
        check_resume(run(*stored), run("train.steps=100000", *new))
    assert with_first_values(run("optim.lr=1e-3"), run()).optim.lr == 1e-3


def test_the_end_of_the_schedule_follows_the_rate() -> None:
    assert load_config(["model=ngpt", "schedule.final_share=0.1", "optim.lr=2e-2"]).schedule.final_lr == 2e-3
    config = load_config(["model=ngpt", "schedule.final_share=0.25"])  # a rate of the table
    assert config.schedule.final_lr == float(config.optim.lr) / 4


def test_the_later_of_final_lr_and_final_share_counts() -> None:
    """A recipe sets final_share, the command line final_lr. Caught: a share that outlives what replaced it."""
    schedule = load_config(["model=ngpt", "recipe=nugpt", "optim.lr=1e-2", "schedule.final_lr=3e-4"]).schedule
    assert (schedule.final_lr, schedule.final_share) == (3e-4, None)
    with pytest.raises(ConfigError, match=r"schedule\.final_lr=0\.001, schedule\.final_share=0\.1: both"):
        load_config(["schedule.final_share=0.1", "schedule.final_lr=1e-3"])
    with pytest.raises(ConfigError, match=r"Set schedule\.final_share=0"):
        load_config(["schedule.final_share=0.1", "schedule.kind=constant"])


def test_a_longer_run_keeps_rate_and_end() -> None:
    """Where the table has another rate for more steps. Caught: an end of the new rate, or a refusal."""
    common = ["model=ngpt", "scale=0.5b", "schedule.final_share=0.1"]
    stored, longer = load_config([*common, "train.steps=10000"]), load_config([*common, "train.steps=100000"])
    assert stored.optim.lr != longer.optim.lr
    check_resume(stored, longer)
    assert with_first_values(longer, stored).schedule.final_lr == stored.schedule.final_lr
    with pytest.raises(ConfigError, match=r"schedule\.final_share: 0\.1 -> 0\.2"):
        check_resume(stored, load_config([*common[:2], "schedule.final_share=0.2", "train.steps=10000"]))
