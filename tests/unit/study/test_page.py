"""The page of a comparison in a real browser; what it holds, without one."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.study.compare.output.page import html, write_page
from tests.example_report import BUDGETS, HOSTILE, example

SMALLEST: dict[str, Any] = {
    "arms": ("gpt", "ngpt"),
    "budgets": BUDGETS[-1:],
    "seeds": (1,),
    "untuned": (),
    "confounds": False,
    "failures": False,
    "nulls": True,
}
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "smallest": SMALLEST,
    "many arms": {"arms": ("gpt", HOSTILE, *(f"without_{k}" for k in range(9))), "untuned": ("gpt", "without_3")},
    "untuned all": {"untuned": ("gpt", "gpt_qk", "ngpt", "powernorm"), "budgets": BUDGETS[:2]},
}
FIGURES = ["speedup", "difference", "end-loss", "curves", "tuning-curves", "sensitivity", "memory-and-time"]


class Text(HTMLParser):
    """The text of a page, and the addresses that its tags name."""

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
    order = ["gpt_vs_ngpt", "2 confounds", "train.batch_tokens", "not resolved", "ngpt is better than gpt"]
    order += ["Speed-up against budget", "End loss against budget", "Loss curves", "Tuning of each arm", "Sensitivity"]
    order += ["Failed points", "Audits", "A power law was invented", "python -m ngpt_train compare"]
    assert re.search(".*".join(map(re.escape, order)), " ".join(read.text.split())), "a part is missing or elsewhere"
    assert all(address.startswith(("#", "data:")) for address in read.addresses if address)
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
            if "gpt_qk" in cells:
                assert "not resolved" in row
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        if "powernorm" in figure:
            assert re.search(r"powernorm \(untuned\)|powernorm</span><span class=\"stamp untuned\"", figure)
    for trace in [trace for chart in charts_of(page).values() for plot in chart["plots"] for trace in plot["traces"]]:
        if trace["meta"].get("arm") == "powernorm":
            assert trace["meta"]["label"] == "powernorm (untuned)"


def charts_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_differences_have_a_row_for_each_arm() -> None:
    """Caught: a bar of another arm or budget, ends that are swapped, a difference with its sign turned."""
    report = example()
    (plot,) = charts_of(html(report))["difference"]["plots"]
    rows = {note["text"]: note["y"] for note in plot["layout"]["annotations"]}
    bars = [trace for trace in plot["traces"] if len(trace["x"]) == 2]
    points = [trace for trace in plot["traces"] if len(trace["x"]) == 1]
    assert len(bars) == len(points) == len(report["differences"])
    assert len(rows) == len(report["arms"]) - 1
    for entry in report["differences"]:
        of_entry = {"arm": entry["arm"], "budget": str(entry["budget"])}
        (bar,) = [trace for trace in bars if of_entry.items() <= trace["meta"].items()]
        (point,) = [trace for trace in points if of_entry.items() <= trace["meta"].items()]
        assert [*bar["x"], *point["x"]] == pytest.approx([entry["low"], entry["high"], entry["estimate"]], rel=1e-6)
        assert {*bar["y"], *point["y"]} == {rows[bar["meta"]["label"]]}
        assert point["marker"]["symbol"].endswith("-open") == (entry["arm"] == "powernorm")


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
    label = next(t["meta"]["label"] for p in charts_of(page)["curves"]["plots"] for t in p["traces"][-1:])
    assert "<" not in label, "plotly would read it as markup"


def test_nothing_is_asked_of_plotly_s_servers() -> None:
    page = html(example())
    assert "default-src 'none'" in page
    script = page[page.rindex("<script>") :]
    assert 'plotlyServerURL: ""' in script
    assert "modeBarButtons:" in script


def test_equal_reports_give_equal_pages(tmp_path: Path) -> None:
    write_page(example(), tmp_path / "a.html")
    write_page(example(), tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def further_keys(report: dict[str, Any]) -> dict[str, Any]:
    """A number that may be 0 and a switch are tuned too."""
    for arm in list(report["arms"]):
        for key, values in (("optim.weight_decay", [0.0, 0.1]), ("model.qk_norm", [True, False, None])):
            points = [{"value": v, "loss": 3.0 + k / 9, "seed": 1, "failed": k == 2} for k, v in enumerate(values)]
            unknown = dict.fromkeys(("optimum", "low", "high", "price_of_two", "price_of_grid"))
            entry = {"arm": arm, "budget": BUDGETS[-1], "key": key, "state": "bracketed", "points": points}
            report["tuning"].append(entry | unknown)
    return report


def visit(browser: Any, folder: Path, case: str, width: int = 1280, dark: bool = False) -> Path:
    """Opens the page from its file at this width of the window, and waits until its figures are drawn."""
    path = folder / "report.html"
    write_page(further_keys(example(**CASES[case])), path)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
    return path


def requests_of(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("case", ["usual", *(pytest.param(case, marks=SLOW) for case in CASES if case != "usual")])
@pytest.mark.parametrize("width", [1280, 375])
def test_it_opens_in_a_browser(browser: Any, tmp_path: Path, case: str, width: int) -> None:
    """Caught: an error in the script, a request, a page wider than the screen, an empty figure."""
    path = visit(browser, tmp_path, case, width)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert [url for url in requests_of(browser) if not url.startswith("data:")] == [path.as_uri()]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.title.startswith("gpt_vs_ngpt"), "a name has run as a script"
    expected = [name for name in FIGURES if case != "smallest" or name in ("end-loss", "curves", "tuning-curves")]
    drawn = browser.execute_script(
        """return Object.fromEntries([...document.querySelectorAll('figure[data-chart]')].map((figure) => [
             figure.dataset.chart,
             [...figure.querySelectorAll('.plot')].map((plot) => [
               plot.data.filter((t) => t.visible !== false && t.x.length > 0).length,
               plot.querySelectorAll('.trace, .barlayer .point').length,
               plot.getBoundingClientRect().width])]))"""
    )
    assert set(expected) <= set(drawn)
    for plots in drawn.values():
        for visible, in_svg, wide in plots:
            assert visible > 0
            assert in_svg > 0
            assert 100 < wide <= width


def choose(browser: Any, figure: str, name: str, value: str) -> None:
    """Clicks the input, as a reader does."""
    from selenium.webdriver.common.by import By

    place = f'figure[data-chart="{figure}"] input[data-choice="{name}"][value="{value}"]'
    browser.find_element(By.CSS_SELECTOR, place).click()


def plotted(browser: Any, figure: str) -> dict[str, Any]:
    found: dict[str, Any] = browser.execute_script(
        """const plot = document.querySelector(`figure[data-chart="${arguments[0]}"] .plot`);
           const shown = plot.data.filter((t) => t.visible !== false);
           return {title: plot.layout.xaxis.title.text, type: plot.layout.xaxis.type,
                   arms: [...new Set(shown.map((t) => t.meta.arm))].sort(), last: shown[0]?.x.at(-1),
                   n: shown.length, range: plot.layout.xaxis.range}""",
        figure,
    )
    return found


def test_what_is_shown_can_be_switched(browser: Any, tmp_path: Path) -> None:
    """Caught: an axis whose numbers stay those of another; an arm, a budget or a seed that stays."""
    visit(browser, tmp_path, "usual")
    before = plotted(browser, "curves")
    assert before["title"] == "training tokens"
    ends = {"tokens": 1_048_576, "flops": 6.0e6 * 1_048_576, "seconds": 128 * 0.05}
    for axis, title in (("flops", "FLOPs"), ("seconds", "time (s"), ("tokens", "tokens")):
        choose(browser, "curves", "axis", axis)
        now = plotted(browser, "curves")
        assert title in now["title"]
        assert now["last"] == pytest.approx(ends[axis], rel=1e-6)
    choose(browser, "curves", "arm", "ngpt")
    assert plotted(browser, "curves")["arms"] == ["gpt", "gpt_qk", "powernorm"]
    assert plotted(browser, "curves")["n"] == before["n"] * 3 // 4
    choose(browser, "curves", "seed", "1")
    assert plotted(browser, "curves")["n"] == before["n"] * 3 // 4 * 2 // 3
    choose(browser, "curves", "budget", str(BUDGETS[0]))
    assert plotted(browser, "curves")["n"] == before["n"] * 3 // 4 * 2 // 3 * 3 // 4
    choose(browser, "curves", "scale", "log")
    assert plotted(browser, "curves")["type"] == "log"
    speedup = browser.execute_script(
        "return [...document.querySelectorAll('[data-chart=speedup] .plot')].map(p => p.layout.yaxis.title.text)[0]"
    )
    assert "tokens" in speedup
    choose(browser, "tuning-curves", "key", "model.qk_norm")
    assert plotted(browser, "tuning-curves")["type"] == "category"
    assert plotted(browser, "tuning-curves")["n"] == 2
    choose(browser, "speedup", "unit", "seconds")
    assert browser.execute_script(
        "return document.querySelector('[data-chart=speedup] .plot').data.filter(t => t.visible !== false)"
        ".every(t => t.meta.unit === 'seconds')"
    )


def test_it_answers_the_keyboard_and_the_pointer(browser: Any, tmp_path: Path) -> None:
    """Caught: a switch that only a mouse reaches; a figure without a hover text; a zoom that is lost at a switch."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    visit(browser, tmp_path, "usual")
    box = browser.find_element(By.CSS_SELECTOR, '[data-chart="curves"] input[data-choice="arm"][value="gpt"]')
    box.send_keys(Keys.SPACE)
    assert "gpt" not in plotted(browser, "curves")["arms"]
    browser.execute_script(
        "const p = document.querySelector('[data-chart=curves] .plot');"
        "Plotly.relayout(p, {'xaxis.range': [1e6, 2e6], 'yaxis.range': [3, 4]})"
    )
    box.send_keys(Keys.SPACE)
    assert plotted(browser, "curves")["range"] == [1e6, 2e6]
    hovered = browser.execute_script(
        "const p = document.querySelector('[data-chart=end-loss] .plot'); Plotly.Fx.hover(p, [{curveNumber: 1,"
        "pointNumber: 0}]); return p.querySelector('.hoverlayer').textContent"
    )
    assert "gpt" in hovered
    assert "nats per token" in hovered


def test_light_and_dark_and_paper(browser: Any, tmp_path: Path) -> None:
    """Caught: dark ink on a dark page; a print in the dark scheme, or without what is folded."""
    visit(browser, tmp_path, "usual", dark=True)
    ink = "return getComputedStyle(document.querySelector('[data-chart=curves] .xtick text')).fill"
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
