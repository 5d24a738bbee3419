"""The words, tables, pictures and text of a report."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt  # rich needs it
from markdown_it.token import Token

from ngpt_train.report.page.chart import styles
from ngpt_train.report.rounded import DASH, interval, si
from ngpt_train.study.compare.comparison import write_reports
from ngpt_train.study.compare.output import series, tables, wording
from ngpt_train.study.compare.output.charts import PICTURES, write_figures
from ngpt_train.study.compare.output.comparison_page import html
from ngpt_train.study.compare.output.document import code, console, document, escaped
from ngpt_train.study.compare.phrases import BROUGHT
from tests.example_report import BUDGETS, HOSTILE, SMALLEST, certificate, example

MINUS = "\N{MINUS SIGN}"
PUBLISHED = Path(__file__).parents[3] / "docs" / "studies"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(8_388_608, "8.39M"), (999_999, "1M"), (123, "123"), (0.05, "0.05"), (5.3e15, "5.3P"), (None, DASH)],
)
def test_numbers_with_prefixes(value: float | None, shown: str) -> None:
    assert si(value) == shown


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ((-0.0412, -0.0501, -0.0323), f"{MINUS}0.0412 ({MINUS}0.0501 to {MINUS}0.0323)"),
        ((1.7, 1.5, None), "1.70 (at least 1.50)"),
        ((1.7, None, 2.0), "1.70 (at most 2.00)"),
        ((0.0, 0.0, 0.0), "0.0000 (0.0000 to 0.0000)"),
        ((-0.18, None, None), f"{MINUS}0.180 (no interval)"),
        ((None, None, None), DASH),
    ],
)
def test_intervals(ends: tuple[float | None, float | None, float | None], shown: str) -> None:
    """Caught: an open end that reads as a closed one."""
    assert interval(*ends) == shown


@pytest.mark.parametrize(("size", "shown"), [(1.0000968, "1.0001 times"), (2.0, "2 times"), (1, "1 times")])
def test_sizes(size: float, shown: str) -> None:
    assert wording.size_text(size) == shown


def test_a_confound_stands_with_its_values_and_its_size() -> None:
    """Caught: a first page that names keys alone."""
    report = example()
    report["referee"][-1] |= {"key": "optim.weight_decay", "values": [0.1, 0.3]}
    report["referee"][-1] |= {"size": 3.0, "note": "not the recipe's"}
    shown = "(0.3 in gpt_qk; 0.1 in gpt; 3 times; not the recipe's)"
    assert wording.confound(report["referee"][-1]) == shown
    assert f"`optim.weight_decay` {escaped(shown)}" in document(report, {}).split("## End loss")[0]


def test_the_verdicts_say_what_they_lack() -> None:
    """Caught: seconds of the runs' own clocks as if measured in turn; an interval of one seed without a word; many
    arms, as if each verdict were the only one; an untuned arm with a verdict; a trend of extrapolated ratios that
    looks like one of measured ratios."""
    report = example()
    for x in report["speedups"]:
        x["clock"] = "own" if x["unit"] == "seconds" else None
    for x in report["differences"]:
        x["n_seeds"] = 1
    report["trends"] = [{"arm": "ngpt", "estimate": 0.85, "low": 0.8, "high": 0.9, "extrapolated": True}]
    table = tables.verdicts(report)
    rows = {row[0]: row for row in table.rows}
    assert rows["ngpt"][1] == "better"
    assert rows["gpt_qk"][1] == "not resolved"
    assert rows["powernorm"][1] == "untuned"
    assert [name for name, row in rows.items() if row[-1] == "0.850 (0.800 to 0.900, extrapolated)"] == ["ngpt"]
    assert "Of an arm with one seed they are without the noise between seeds." in table.note
    assert "have the price of the grid" not in table.note
    report["differences"][0] |= {"price_baseline": 0.0, "price_arm": 0.01}
    assert "have the price of the grid" in tables.verdicts(report).note
    assert "own clocks" in table.note
    assert any(row[-2] == "own" for row in tables.speedups(report).rows)
    n = len(report["arms"]) - 1
    assert n > 1
    assert f"in up to some {round(100 * (1 - 0.95**n))} % of such comparisons" in table.note
    assert "for itself" not in tables.verdicts(example(arms=("gpt", "ngpt"))).note


def test_a_row_is_of_one_budget_and_a_ratio_beyond_the_data_is_marked() -> None:
    """Caught: a ratio of another budget than the difference beside it; an extrapolated ratio without a word."""
    report = example(arms=("gpt", "ngpt"))
    for s in report["speedups"]:
        s["high"] = s["estimate"] * 1.2
    verdict = tables.verdicts(report).rows[1]
    assert verdict[2:4] == ["8.39M", "3.1531"]
    assert verdict[5] == "1.60 (1.43 to 1.92, extrapolated)"
    at_last = [row for row in tables.speedups(report).rows if row[2] == "8.39M" and "annealed" in row[1]]
    assert at_last
    assert all("extrapolated" in ratio for row in at_last for ratio in row[3:6])
    others = {(row[0], row[2]) for row in tables.speedups(report).rows if "annealed" not in row[1]}
    assert not others & {(row[0], row[2]) for row in at_last}, "a flattering ratio beside the other one"
    assert "extrapolated" in next(
        line for line in console(report).splitlines() if line.startswith("ngpt ") and "8.39M" in line
    )


def test_worse_because_a_seed_fails() -> None:
    """Caught: an arm that is called worse for its losses, where one seed's failure has thrown away its best value."""
    report = example()
    values, at = {"optim.lr": 0.5}, BUDGETS[-1]
    of_arm = {"arm": "powernorm", "budget": at, "values": values, "run": "runs/a"}
    report["failures"].append({**of_arm, "seed": 3, "reason": "diverged at step 7"})
    assert "fails for a seed" not in " ".join(wording.cautions(report))
    best = report["arms"]["powernorm"]["best_by_budget"][str(at)]
    of_seeds = [x for x in report["losses"] if (x["arm"], x["budget"], x["values"]) == ("powernorm", at, best)]
    easy = min(of_seeds, key=lambda x: x["loss"])
    report["losses"].append({**easy, **of_arm, "loss": easy["loss"] + 1e-6})  # below the mean, above its own seed
    assert "fails for a seed" not in " ".join(wording.cautions(report))
    report["losses"][-1]["loss"] = 1.0
    said = "With optim.lr=0.5 powernorm fails for a seed (diverged at step 7), while 1 of its seeds end lower in"
    assert said in " ".join(wording.cautions(report))


def test_the_first_page_says_what_was_tuned_and_looked_at() -> None:
    """Caught: "no confounds" without the compared keys, and the keys that came with the architectures; untuned keys of
    the baseline, in silence."""
    report = example(confounds=False)
    report["referee"][-1]["note"] = BROUGHT
    for text in (document(report, {}).split("![")[0], console(report), html(report)):
        for said in ("117 keys of the config and 2 facts of run.json (git_commit, device)", "cannot see"):
            assert said in text.replace("\\", "")
        assert "1 key that differ" in text
        assert "optim.weight_decay" in text
        assert "Of gpt, the baseline, optim.lr was tuned here, and 2 keys" in text
        assert "may be worth more than the difference" in text
    table = tables.tuning_of_keys(report)
    assert "Not tuned in all arms: optim.eps=1e-08." in table.note
    assert table.rows[0] == ["gpt", "optim.lr=[0.0005, 0.001, 0.002]", "", "optim.weight_decay=0", "8.39M"]
    assert table.rows[1][2:4] == ["optim.clip_norm=None", "optim.weight_decay=0.1"]


def test_keys_of_an_arm_beside_the_baseline_s() -> None:
    """Caught: a key that the arm lacks, or has chosen where the baseline has not; an arm that hides behind another."""
    report = example()
    of = report["tuning_of_keys"]
    for arm in of:
        of[arm] |= {"tuned": {"optim.lr": [1, 2]}, "chosen": {"a": 1}, "not_tuned": {"b": 2, "c": 3}}
    of["ngpt"] |= {"chosen": {"a": 1, "b": 2}, "not_tuned": {"c": 3}}
    of["powernorm"] |= {"tuned": {}, "chosen": {}, "not_tuned": {"c": 4}}
    rows = {row[0]: row[1:4] for row in tables.tuning_of_keys(report).rows}
    assert rows["gpt"] == ["optim.lr=[1, 2]", "a=1", "b=2, c=3"]
    assert rows["gpt_qk"] == ["optim.lr=[1, 2]", "", ""]
    assert rows["ngpt"] == ["optim.lr=[1, 2]", "b=2", ""]
    assert rows["powernorm (untuned)"] == ["", "", "c=4, no optim.lr, no a, no b"]


def test_a_table_says_once_what_its_rows_share() -> None:
    """Caught: a column that is lost, or dropped though a row differs; a letter without its sentence."""
    columns = [("Arm", tables.ARM), *((name, tables.NUMBER) for name in ("n", "m", "k", "none")), ("Note", tables.TEXT)]
    why = "a sentence that stands in two rows"
    rows = [["a", "1", "3", "1", DASH, why], ["b", "2", "3", "2", DASH, why], ["c", "2", "3", "2", DASH, ""]]
    found = tables.Table("t", "T", columns, rows, "Note.").condensed()
    assert [name for name, _ in found.columns] == ["Arm", "n = k", "Note"]
    assert [list(row) for row in found.rows] == [["a", "1", "(a)"], ["b", "2", "(a)"], ["c", "2", ""]]
    assert found.note == f"In all rows, m: 3. Empty: none. Note. (a) {why}."


def test_what_a_table_shows_is_no_note() -> None:
    """Caught: a note about an arm's verdict that the table of verdicts lacks, lost with the others."""
    report = example()
    shown = "ngpt against gpt: better at 8,388,608 tokens, the largest budget of both, from 3 seeds and 256 rows."
    noise = "ngpt less gpt, standard deviation of the difference between seeds: 0.02 at 1,048,576 tokens."
    kept = ["powernorm against gpt: untuned at 8,388,608 tokens, because gpt is tuned.", *report["notes"]]
    report["notes"] = [shown, noise, *kept]
    assert wording.notes(report) == kept


def test_the_spread_of_a_difference_between_seeds() -> None:
    """Caught: a spread of losses, or of runs that are not of one seed."""
    report = example(arms=("gpt", "ngpt"))
    for x in report["losses"]:
        x["loss"] = 3.0 + x["seed"] + (0.1 * (x["seed"] - 2) if x["arm"] == "ngpt" else 0)
    table = tables.differences(report)
    at = [name for name, _ in table.columns].index("Between seeds")
    assert {row[at] for row in table.rows} == {"0.1"}


def test_many_arms_with_one_value_stand_together() -> None:
    """Caught: a cell with 24 names; an arm whose value is another's."""
    names = [f"arm{k}" for k in range(24)]
    values: list[Any] = ["vector"] * 24
    values[3], values[20] = "scalar", "fixed"
    entry = {"arms": names, "values": values, "key": "model.s_z.kind", "size": None, "note": ""}
    assert wording.confound(entry) == "(scalar in arm3; fixed in arm20; vector in 22 others)"
    few = {**entry, "arms": names[:4], "values": values[:4]}
    assert wording.confound(few) == "(scalar in arm3; vector in 3 others)"


def test_runs_of_an_arm_that_differ_stand_with_the_arms() -> None:
    """Caught: a confound within an arm that is lost because the arms differ otherwise."""
    report = example(confounds=False)
    about = {"key": "cpu", "kind": "confound", "size": None}
    among = {"arms": ["gpt"], "values": ["x", "y"], "note": "the runs of gpt differ among themselves"}
    between = {"arms": ["gpt", "ngpt"], "values": [["x", "y"], "x"], "note": "other machines"}
    report["referee"] = [{**about, **among}, {**about, **between}]
    (row,) = tables.referee(report).rows
    assert row[-1] == "other machines; the runs of gpt differ among themselves"
    report["referee"][1]["values"] = ["x", "z"]
    assert [row[2] for row in tables.referee(report).rows] == ["x and y in gpt", "z in ngpt; x in gpt"]


def test_ratios_of_which_nothing_is_known_are_one_sentence() -> None:
    """Caught: a row for each arm and unit that says the same; a reason that is lost."""
    report = example()
    unknown = {"estimate": None, "low": None, "high": None, "note": "one budget"}
    report["speedups"] = [{**s, **unknown} if s["how"] == "annealed" else s for s in report["speedups"]]
    rows, note = tables.speedups(report).rows, tables.speedups(report).note
    assert note.count("No ratio between annealed runs at") == len(BUDGETS)
    assert "at 8.39M tokens for any arm: one budget." in note
    known = {(s["arm"], s["budget"]) for s in report["speedups"] if s["how"] == "within_schedule"}
    assert len(rows) == len(known)
    first = next(s for s in report["speedups"] if s["how"] == "within_schedule")
    first |= {"estimate": None, "low": None, "high": None, "note": "no clock"}
    row = next(row for row in tables.speedups(report).rows if row[:2] == [first["arm"], "within one schedule"])
    assert row[3] == DASH
    assert "tokens: no clock" in row[-1]


def test_the_console_shows_names_without_codes() -> None:
    """Caught: a directory whose name redraws the terminal or begins a line of its own."""
    report = example()
    report["title"] = "a\x1b[2J\nno confounds"
    assert "a?[2J?no confounds" in console(report)


def test_what_a_reader_must_know_first() -> None:
    said = wording.cautions(example(**SMALLEST))
    assert [sentence.split(":")[0] for sentence in said] == ["One seed", "One budget"]
    report = example()
    assert not any("Audit" in sentence for sentence in wording.cautions(report))
    report["tuning_of_keys"]["gpt"]["tuned_elsewhere"] = {"optim.betas": 819_200}
    assert any("819k tokens, not at the budget of the verdict: optim.betas" in x for x in wording.cautions(report))
    for other in ({"equal": False}, {"valid": False}):
        report["audits"] = [certificate("runs/a", **other)]
        assert any("runs/a" in sentence for sentence in wording.cautions(report))


def test_every_failure_and_every_difference_has_a_row() -> None:
    report = example()
    assert len(tables.failures(report).rows) == len(report["failures"])
    assert [row[0] for row in tables.referee(report).rows][:2] == ["confound", "confound"]
    assert sum(row[1].count(",") + 1 for row in tables.referee(report).rows) == len(report["referee"])
    assert len(tables.runs(report).rows) == len(report["losses"])


def test_end_losses_are_of_the_best_values() -> None:
    """Caught: runs of other learning rates among the compared ones."""
    report = example(arms=("gpt", "ngpt"))
    before = series.end_losses(report, "ngpt")
    other = {**report["losses"][0], "arm": "ngpt", "loss": 9.0, "run": "runs/other"}
    report["losses"].append(other)
    report["curves"].append({**report["curves"][0], "arm": "ngpt", "run": "runs/other", "best": False})
    assert series.end_losses(report, "ngpt") == before


def test_seconds_are_of_step_times_measured_in_turn() -> None:
    """Caught: a run's own clock where a better one is known."""
    report = example(arms=("gpt", "ngpt"))
    curve = report["curves"][0]
    curve["eval"]["seconds"] = [100.0] * len(curve["eval"]["step"])
    assert series.eval_axis(report, curve, "seconds")[-1] == pytest.approx(0.05 * curve["eval"]["step"][-1])
    assert "measured in turn" in series.axis_title(report, "seconds")
    report["costs"][1]["step_time_how"] = "own"
    assert series.eval_axis(report, curve, "seconds")[-1] == 100.0
    assert "own clocks" in series.axis_title(report, "seconds")


def test_the_parabola_is_the_one_of_the_fit() -> None:
    points = [
        {"value": 0.01 * 2.0**k, "loss": 3 + 0.2 * (k - 0.3) ** 2, "seed": 0, "failed": False} for k in range(-2, 3)
    ]
    entry = {"points": points, "optimum": 0.01 * 2**0.3, "price_of_two": 0.2, "low": None, "high": None}
    x, y = series.parabola(entry) or ([], [])
    assert min(y) == pytest.approx(3, abs=1e-3)
    assert x[y.index(min(y))] == pytest.approx(0.01 * 2**0.3, rel=0.1)
    octaves, above = series.sensitivity(entry) or ([], [])
    assert above == pytest.approx([0.2 * o**2 for o in octaves])


def test_matched_loss_arrows_end_where_the_baseline_s_fit_has_that_loss() -> None:
    report = example(arms=("gpt", "ngpt"), seeds=tuple(range(12)))
    tokens, losses = series.fit(report, "gpt") or ([], [])
    for _, start, end, loss in list(series.arrows(report, "tokens"))[:2]:
        assert end / start == pytest.approx(1.6)
        nearest = min(range(len(tokens)), key=lambda k: abs(math.log(tokens[k] / end)))
        assert losses[nearest] == pytest.approx(loss, abs=0.03)


def test_an_arm_looks_the_same_everywhere() -> None:
    names = [f"arm{k}" for k in range(12)]
    looks = styles(names, "arm3")
    assert looks["arm3"] == styles(["arm3"], "arm3")["arm3"], "the baseline is the first"
    assert len({(look.colour, look.symbol) for look in looks.values()}) == 12


@pytest.mark.parametrize(
    "case",
    [
        SMALLEST,
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"arms": ("gpt", "a$x$b", HOSTILE), "untuned": ("gpt", "a$x$b")}, marks=pytest.mark.slow),
    ],
)
def test_pictures(tmp_path: Path, case: dict[str, Any]) -> None:
    """Caught: a picture without the stamp of an arm; a name that is taken for a formula; a date in an SVG."""
    report = example(**case)
    names = list(write_figures(report, tmp_path / "a"))
    assert {"end_loss", "loss_over_tokens", "tuning"} <= set(names) <= set(PICTURES)
    if case == SMALLEST:
        write_figures(report, tmp_path / "b")
    for name in names:
        assert (tmp_path / f"a/{name}.png").stat().st_size > 5000
        drawn = (tmp_path / f"a/{name}.svg").read_bytes()
        assert case != SMALLEST or drawn == (tmp_path / f"b/{name}.svg").read_bytes()
        for arm in report["arms"]:
            if arm != HOSTILE and not wording.is_tuned(report, arm) and (arm != "gpt" or name != "speedup"):
                assert wording.label(report, arm) in drawn.decode()
    shown = (tmp_path / "a/difference.svg").read_text()
    for arm in [arm for arm in report["arms"] if arm != "gpt"]:
        gap = next(d for d in report["differences"] if (d["arm"], d["budget"]) == (arm, wording.budget_of(report, arm)))
        assert interval(gap["estimate"], gap["low"], gap["high"]) in shown


def test_the_document(tmp_path: Path) -> None:
    report = example(arms=("gpt", HOSTILE), untuned=(HOSTILE,))
    text = document(report, {"figures/speedup.png": PICTURES["speedup"][1].caption})
    assert "<img" not in text
    for table in [line for line in text.splitlines() if line.startswith("|")]:
        assert table.count(" | ") >= 1
    rows = [line for line in text.splitlines() if line.startswith("| x&lt;img")]
    assert rows
    assert all("(untuned)" in row for row in rows)
    order = ["## Verdicts", "**Confounds**", "![Speed-up", "## Failed points", "## How to regenerate"]
    assert sorted(order, key=text.index) == order
    assert all(f"    {command}" in text for command in report["commands"])


def test_text_in_markdown() -> None:
    assert escaped("gpt_qk a|b *c* `d` _e_") == "gpt_qk a\\|b \\*c\\* \\`d\\` \\_e\\_"
    assert code("optim.lr") == "`optim.lr`"
    assert "|" not in code("a | b").replace("\\|", "")


@pytest.mark.parametrize(
    "name",
    [
        "# <b> a|b `c` [d](http:e) ![f](g)\n\n# h",
        "> __a__ _b_ *c* ~~d~~ &lt;",
        "1. a <!-- b",
        "- a\n|---|",
        "+ \\_a",
        "---",
        "``` a\n```\n<script>",
    ],
)
def test_names_are_no_markdown(name: str) -> None:
    """Caught: a name that makes a heading, list, quotation, link, cell or emphasis, or ends one of ours; HTML."""
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def read(name: str) -> list[Token]:
        report = example(arms=("gpt", name), untuned=(name,)) | {"title": name, "notes": [name]}
        blocks = markdown.parse(document(report, {}))
        return [*blocks, *(token for block in blocks for token in block.children or ())]

    # A bar or a backtick cannot stand in code, which is then text.
    kinds, others = ([x.type for x in read(y) if x.type not in ("text", "code_inline")] for y in (name, "other"))
    assert kinds == others
    texts = [token.content for token in read(name) if token.type == "text"]
    assert texts.count(" ".join(name.split())) >= 2  # the title and the note


def test_the_console_s_table() -> None:
    lines = console(example()).splitlines()
    rows = [line for line in lines if line.startswith(("gpt", "ngpt", "powernorm")) and "M  " in line]
    assert len(rows) == 4 * len(BUDGETS)
    assert "powernorm (untuned)" in rows[-1]
    assert rows[11].split()[:3] == ["ngpt", "8.39M", "3.1531"]
    assert rows[11].endswith("better")


def test_all_is_written(tmp_path: Path) -> None:
    """Caught: a missing picture; a CPU's peak memory without the remark that it includes the preparation of data."""
    write_reports(example(**SMALLEST), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["format"] == 1
    text = (tmp_path / "report.md").read_text()
    assert "on a CPU it is of the whole process" in text
    pictures = [line.partition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures
    assert all((tmp_path / picture).is_file() for picture in pictures)
    assert 50_000 < (tmp_path / "report.html").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    "study", ["gpt_vs_ngpt", "long_budget", "ngpt_parts", "optimizers", "powernorm_translation", "precision"]
)
def test_published_documents_follow_from_their_numbers(study: str) -> None:
    """Caught: a report.md written by hand, or left behind by its generator."""
    folder = PUBLISHED / study
    captions = {f"figures/{x.name}": PICTURES[x.stem][1].caption for x in (folder / "figures").glob("*.svg")}
    report = json.loads((folder / "report.json").read_text())
    assert document(report, captions) == (folder / "report.md").read_text()
