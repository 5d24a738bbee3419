"""The page of a comparison: its content, and its behaviour in a real browser."""

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.study.compare.output.charts import difference, speedup
from ngpt_train.study.compare.output.comparison_page import html
from tests.example_report import BUDGETS, HOSTILE, SMALLEST, example

CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "smallest": SMALLEST,
    "many arms": {"arms": ("gpt", HOSTILE, *(f"without_{k}" for k in range(9))), "untuned": ("gpt", "without_3")},
    "untuned all": {"untuned": ("gpt", "gpt_qk", "ngpt", "powernorm"), "budgets": BUDGETS[:2]},
}
Visit = Callable[..., list[list[Any]]]
FIGURES = ["speedup", "difference", "end-loss", "curves", "tuning-curves", "sensitivity", "memory-and-time"]


class Text(HTMLParser):
    """The text of a page, and the addresses in its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.addresses, self.tags, self.inside = "", [], [], ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.text += " " + data


def test_the_first_screen_and_the_rest() -> None:
    page = html(example())
    read = Text(page)
    order = ["gpt_vs_ngpt", "2 confounds", "train.batch_tokens", "not resolved", "better"]
    order += ["Speed-up against budget", "End loss against budget", "Loss curves", "Tuning of each arm", "Sensitivity"]
    order += ["Failed points", "Audits", "A power law was invented", "python -m ngpt_train compare"]
    assert re.search(".*".join(map(re.escape, order)), " ".join(read.text.split())), "a part is missing or elsewhere"
    assert all(address.startswith(("#", "data:")) for address in read.addresses if address)
    assert "default-src 'none'" in page
    assert html(example()) == page, "a time, or an order by chance"
    assert "No confounds" in Text(html(example(confounds=False))).text


def test_stamps_stand_on_every_table_and_figure() -> None:
    """Caught: a table or a figure that shows an untuned arm as if it were tuned."""
    report = example()
    page = html(report)
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL):
            cells = " ".join(re.findall(r'class="name">([^<]*)', row))
            if "powernorm" in cells:
                assert "untuned" in row
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        if "powernorm" in figure:
            assert re.search(r"powernorm \(untuned\)|powernorm</span><span class=\"stamp untuned\"", figure)
    for chart in charts_of(page).values():
        assert chart["arms"]["powernorm"][2] == "powernorm (untuned)"


def charts_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1])["charts"])


def test_differences_have_a_row_for_each_arm() -> None:
    """Caught: a bar of another arm or budget, ends that are swapped, a difference with its sign turned."""
    report = example()
    (plot,) = difference(report).plots
    names = plot.y[0].rows
    bars, points = ([mark for mark in plot.marks if len(mark.x) == n] for n in (2, 1))
    assert len(bars) == len(points) == len(report["differences"])
    assert len(names) == len(report["arms"]) - 1
    for entry in report["differences"]:
        budget = str(entry["budget"])
        (bar,) = [mark for mark in bars if mark.arm == entry["arm"] and budget in mark.when["budget"]]
        (point,) = [mark for mark in points if mark.arm == entry["arm"] and budget in mark.when["budget"]]
        assert [*bar.x, *point.x] == [entry["low"], entry["high"], entry["estimate"]]
        assert {names[int(row or 0)].split(" ")[0] for row in (*bar.y, *point.y)} == {entry["arm"]}
        assert point.hollow == [entry["arm"] == "powernorm"]
        assert ("largest" in point.when["budget"]) == (entry["budget"] == max(BUDGETS))


def test_an_open_end_is_an_arrow_and_a_band_has_both_ends() -> None:
    """Caught: an interval without an upper end that is drawn as if it had one."""
    report = example(arms=("gpt", "ngpt"))
    (plot,) = speedup(report).plots
    marks = [mark for mark in plot.marks if mark.when == {"unit": "tokens", "how": "annealed"}]
    (band,) = [mark for mark in marks if mark.area]
    of_arm = [s for s in report["speedups"] if (s["unit"], s["how"]) == ("tokens", "annealed")]
    closed = [s for s in of_arm if s["high"] is not None]
    assert list(band.y) == [s["low"] for s in closed] + [s["high"] for s in reversed(closed)]
    arrows = [mark for mark in marks if mark.symbol == "^"]
    assert [mark.y[0] for mark in arrows] == [s["low"] for s in of_arm if s["high"] is None]
    assert arrows
    (estimates,) = [mark for mark in marks if mark.hover]
    assert estimates.hollow == [s["extrapolated"] for s in of_arm]


def test_names_are_text() -> None:
    """Caught: a run's or an arm's name that is taken for HTML."""
    report = example(arms=("gpt", HOSTILE), untuned=())
    report["title"] = report["notes"][0] = report["commands"][0] = HOSTILE
    report["failures"][0]["reason"] = report["referee"][0]["note"] = HOSTILE
    page = html(report)
    outside = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert HOSTILE in Text(page).text
    assert "<img" not in outside
    assert page.count("<script") - page.count("<script>") >= 1
    assert "</script>|" not in page


def further_keys(report: dict[str, Any]) -> dict[str, Any]:
    """Adds two tuned keys to the report: a number that may be 0, and a switch."""
    for arm in list(report["arms"]):
        for key, values in (("optim.weight_decay", [0.0, 0.1]), ("model.qk_norm", [True, False, None])):
            points = [{"value": v, "loss": 3.0 + k / 9, "seed": 1, "failed": k == 2} for k, v in enumerate(values)]
            unknown = dict.fromkeys(("optimum", "low", "high", "price_of_two", "price_of_grid"))
            entry = {"arm": arm, "budget": BUDGETS[-1], "key": key, "state": "bracketed", "points": points}
            report["tuning"].append(entry | unknown)
    return report


def written(folder: Path, case: str = "usual") -> Path:
    (folder / "report.html").write_text(html(further_keys(example(**CASES[case]))))
    return folder / "report.html"


@pytest.mark.parametrize(
    "case", ["usual", *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES if case != "usual")]
)
@pytest.mark.parametrize("width", [1280, 375])
def test_it_opens_in_a_browser(browser: Any, visit: Visit, tmp_path: Path, case: str, width: int) -> None:
    """Caught: what `visit` catches; a missing figure."""
    drawn = {name for name, *_ in visit(written(tmp_path, case), width)}
    assert browser.title.startswith("gpt_vs_ngpt"), "a name has run as a script"
    expected = [name for name in FIGURES if case != "smallest" or name in ("end-loss", "curves", "tuning-curves")]
    assert set(expected) <= drawn


def choose(browser: Any, figure: str, name: str, value: str) -> None:
    """Clicks the input, as a reader does."""
    from selenium.webdriver.common.by import By

    place = f'figure[data-chart="{figure}"] input[data-choice="{name}"][value="{value}"]'
    browser.find_element(By.CSS_SELECTOR, place).click()


def plotted(browser: Any, figure: str) -> dict[str, Any]:
    found: dict[str, Any] = browser.execute_script(
        """const plot = document.querySelector(`figure[data-chart="${arguments[0]}"] .plot`);
           const marks = [...plot.querySelectorAll('.mark')], words = (name) => plot.querySelector(name).textContent;
           return {x: words('.x-title'), y: words('.y-title'), n: marks.length,
                   arms: [...new Set(marks.map((mark) => mark.dataset.arm))].sort(),
                   ticks: [...plot.querySelectorAll('.x-tick')].map((tick) => tick.textContent)}""",
        figure,
    )
    return found


def pointed(browser: Any, figure: str, at: int = -1) -> str:
    """The text beside the pointer at a symbol of the figure."""
    from selenium.webdriver.common.action_chains import ActionChains

    symbols = browser.find_elements(
        "css selector", f'figure[data-chart="{figure}"] .plot .mark path[stroke-width="1.5"]'
    )
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", symbols[at])
    ActionChains(browser).move_to_element(symbols[at]).perform()
    return str(browser.execute_script("const t = document.querySelector('.tip'); return t.hidden ? '' : t.textContent"))


def test_what_is_shown_can_be_switched(browser: Any, visit: Visit, tmp_path: Path) -> None:
    """Caught: an axis that keeps the numbers of another; an arm, a budget or a seed that stays."""
    visit(written(tmp_path))
    before = plotted(browser, "curves")
    assert before["x"] == "training tokens"
    for axis, title, last in (("flops", "FLOPs", "50T"), ("seconds", "time (s", "70"), ("tokens", "tokens", "8M")):
        choose(browser, "curves", "axis", axis)
        now = plotted(browser, "curves")
        assert title in now["x"]
        assert now["ticks"][-1] == last
    choose(browser, "curves", "arm", "ngpt")
    assert plotted(browser, "curves")["arms"] == ["gpt", "gpt_qk", "powernorm"]
    assert plotted(browser, "curves")["n"] == before["n"] * 3 // 4
    choose(browser, "curves", "seed", "1")
    assert plotted(browser, "curves")["n"] == before["n"] * 3 // 4 * 2 // 3
    choose(browser, "curves", "budget", str(BUDGETS[0]))
    assert plotted(browser, "curves")["n"] == before["n"] * 3 // 4 * 2 // 3 * 3 // 4
    choose(browser, "curves", "scale", "log")
    assert plotted(browser, "curves")["ticks"] != before["ticks"]
    assert "tokens" in plotted(browser, "speedup")["y"]
    choose(browser, "speedup", "unit", "seconds")
    assert "seconds" in plotted(browser, "speedup")["y"]
    choose(browser, "tuning-curves", "key", "model.qk_norm")
    assert plotted(browser, "tuning-curves")["ticks"] == ["True", "False", "None"]
    assert plotted(browser, "tuning-curves")["n"] == 2


def test_it_answers_the_keyboard_and_the_pointer(browser: Any, visit: Visit, tmp_path: Path) -> None:
    """Caught: a switch that only a mouse reaches; a point without its text; a zoom that is lost at a switch."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    visit(written(tmp_path))
    box = browser.find_element("css selector", '[data-chart="curves"] input[data-choice="arm"][value="gpt"]')
    box.send_keys(Keys.SPACE)
    assert "gpt" not in plotted(browser, "curves")["arms"]
    assert re.fullmatch(r"powernorm \(untuned\)\n8.39M tokens: .* times\n?.*", pointed(browser, "speedup"))
    said = pointed(browser, "curves")
    assert re.search(r"powernorm \(untuned\), 8.39M tokens, seed 3\noptim.lr=0.008\nvalidation 3.\d{4} nats", said), (
        said
    )
    plot = browser.find_element("css selector", "[data-chart=curves] .plot")
    before = plotted(browser, "curves")["ticks"]
    ActionChains(browser).move_to_element(plot).click_and_hold().move_by_offset(90, 90).release().perform()
    zoomed = plotted(browser, "curves")["ticks"]
    assert zoomed != before
    box.send_keys(Keys.SPACE)
    assert "gpt" in plotted(browser, "curves")["arms"]
    assert plotted(browser, "curves")["ticks"] == zoomed
    ActionChains(browser).double_click(plot).perform()
    assert plotted(browser, "curves")["ticks"] == before


def test_light_and_dark_and_paper(browser: Any, visit: Visit, tmp_path: Path) -> None:
    """Caught: dark ink on a dark page; a print in the dark scheme, or without the folded tables."""
    visit(written(tmp_path), dark=True)
    ink = "return getComputedStyle(document.querySelector('[data-chart=curves] .x-tick')).fill"
    paper = "return getComputedStyle(document.body).backgroundColor"
    assert bright(browser.execute_script(ink)) > 180 > 60 > bright(browser.execute_script(paper))
    button = "document.getElementById('theme').click();"
    browser.execute_script(button)
    assert bright(browser.execute_script(ink)) < 60 < 180 < bright(browser.execute_script(paper))
    browser.execute_script(button)
    assert bright(browser.execute_script(ink)) > 180
    browser.execute_script(
        "window.n = 0; addEventListener('beforeprint', () => { n = document.querySelectorAll('details[open]').length })"
    )
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert printed.startswith(b"%PDF")
    assert browser.execute_script("return n") == 3
    assert bright(browser.execute_script(ink)) > 180, "after the print, as before"


def bright(colour: str) -> float:
    """0 to 255 of `rgb(r, g, b)`."""
    return sum(float(x) for x in re.findall(r"[\d.]+", colour)[:3]) / 3
