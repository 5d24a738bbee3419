"""The pages of `analyze` and `probe` in a real browser, and what they hold."""

import json
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ngpt_train.analysis import probe_page
from ngpt_train.analysis.analysis_files import (
    MOST_POINTS,
    as_json,
    html,
    thinned,
    write_parquet,
    write_pictures,
)
from ngpt_train.analysis.measures.of_run import Curve
from ngpt_train.analysis.paper_figures import Measured, Skipped
from ngpt_train.analysis.probe_losses import report
from ngpt_train.analysis.token_classes import of_position
from ngpt_train.core.files import write_json
from ngpt_train.report.page.chart import styles
from ngpt_train.report.page.html import table

HOSTILE = "<img src=x onerror=\"document.title='bad'\"></script><b>$x$"
RUNS = ["gpt", HOSTILE]


def example() -> Measured:
    layers = np.arange(3.0)
    heads = [Curve("wq", "heads", np.repeat(layers, 2), np.linspace(2, 9, 6), "points")]
    found = {
        name: [
            Curve("wq", "median", layers, np.array([3.0, 1e6, np.inf])),
            Curve("wq", "median (renormalized)", layers, np.array([2.0, 40.0, 7.0]), "dotted"),
            *heads,
            Curve("w_down", "median", layers, layers + 1),
        ]
        for name in RUNS
    }
    rank = np.linspace(0, 1, 5000)
    spectrum = {name: [Curve("input", "", rank, np.exp(-3 * rank))] for name in RUNS}
    edges = np.linspace(0, 1, 11)
    counted = {name: [Curve("s_z", "", edges[1:] - 0.05, np.arange(10.0), edges=edges)] for name in RUNS}
    skipped = [Skipped("tnt_3", HOSTILE, "has no encoder")]
    return Measured({"ngpt_10": found, "powernorm_6": spectrum, "ngpt_14": counted}, skipped)


def content_of(measured: Measured) -> dict[str, Any]:
    runs = [{"name": name, "checkpoint": f"runs/{k}", "step": 1000 * k} for k, name in enumerate(RUNS)]
    return as_json(measured, runs, f"python -m ngpt_train analyze {HOSTILE}")


def probed() -> dict[str, Any]:
    targets = np.arange(48).reshape(4, 12) + 70
    targets[0, 8:] = -100
    losses = {name: np.random.default_rng(k).exponential(3, (4, 12)) for k, name in enumerate(RUNS)}
    letters = [chr(k) for k in range(257)]
    letters[75], letters[80] = HOSTILE, "\n"
    models = [{"name": name, "step": 7} for name in RUNS]
    about = {"command": "probe", "data": HOSTILE, "rows_evaluated": 4, "rows_hash": "0" * 16}
    rows = (targets.clip(0), targets)
    return report(models, losses, rows, np.arange(4), [of_position(targets)], letters, 2, about)


def test_numbers_keep_all_digits(tmp_path: Path) -> None:
    """Caught: infinity as a number in JSON; curves that are thinned in the data; a panel without curves."""
    measured = example()
    content = content_of(measured)
    write_json(tmp_path / "analysis.json", content, indent=None)
    write_parquet(measured, tmp_path / "analysis.parquet")
    found = json.loads((tmp_path / "analysis.json").read_text(), parse_constant=pytest.fail)
    panel = found["figures"]["ngpt_10"]["panels"]["wq"]
    assert [(c["run"], c["name"]) for c in panel["curves"]][:2] == [
        ("gpt", "median"),
        ("gpt", "median (renormalized)"),
    ]
    assert panel["curves"][0]["y"] == [3.0, 1e6, None]
    assert "sigma_max / sigma_min" in found["figures"]["ngpt_10"]["definition"]
    assert len(found["figures"]["powernorm_6"]["panels"]["input"]["curves"][0]["y"]) == 5000
    assert len(found["figures"]["ngpt_14"]["panels"]["s_z"]["curves"][0]["edges"]) == 11
    assert found["skipped"] == [{"figure": "tnt_3", "run": HOSTILE, "why": "has no encoder"}]
    table = pq.read_table(tmp_path / "analysis.parquet").to_pydict()
    rows = list(zip(*(table[key] for key in ("figure", "panel", "run", "curve", "x", "y")), strict=True))
    assert ("ngpt_10", "wq", HOSTILE, "median", 2.0, np.inf) in rows
    assert len(rows) == 2 * (3 + 3 + 6 + 3 + 5000 + 10)


def test_pictures_and_thinning(tmp_path: Path) -> None:
    """Caught: a figure without its picture; a name that matplotlib takes for a formula; the last point left out."""
    write_pictures(example(), RUNS, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"ngpt_10.png", "powernorm_6.png", "ngpt_14.png"}
    svg = (tmp_path / "ngpt_10.svg").read_text()
    assert "&lt;b&gt;" in svg or "&lt;img" in svg
    assert "MLP2, W_down" in svg
    x, y = thinned(Curve("input", "", np.arange(5000.0), np.arange(5000.0)))
    assert len(x) == MOST_POINTS
    assert (x[0], x[-1]) == (0, 4999)
    assert (x == y).all()


def test_pages_hold_text_as_text() -> None:
    """Caught: a name or a token that is HTML, or that ends the script of the charts."""
    for page in (html(example(), content_of(example())), probe_page.html(probed())):
        outside = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
        assert "<img" not in outside
        assert "onerror=&quot;" in outside
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", outside)
        charts = re.search(r'id="charts">(.*?)</script>', page, flags=re.DOTALL)
        assert charts
        assert json.loads(charts[1])


def test_probe_s_differences_and_colours_are_those_of_compare() -> None:
    """Caught: a difference with compare's sign turned, or without a word on its sign; a model in another colour than
    the arm has in a comparison; a table whose last head is cut on a screen."""
    found = probed()
    names = [model["name"] for model in found["models"]]
    (each,) = found["classes"]
    for line, of in zip(probe_page.class_rows(each, names), each["classes"], strict=True):
        assert float(line[f"{HOSTILE} minus gpt"]) == pytest.approx(of["loss"][HOSTILE] - of["loss"]["gpt"], abs=1e-4)
    page = probe_page.html(found)
    assert f"where it is negative, {escape(HOSTILE)} is better" in page
    looks = styles(["gpt", HOSTILE], "gpt")
    assert f'color:{looks["gpt"].colour}" aria-hidden="true">{looks["gpt"].glyph}' in page
    assert "wrap" not in table([{"step": 7, "loss": 3.14159}])


@pytest.mark.parametrize("which", ["analyze", "probe"])
@pytest.mark.parametrize("width", [1280, 375])
def test_they_open_in_a_browser(
    browser: Any, visit: Callable[..., Any], tmp_path: Path, which: str, width: int
) -> None:
    """Caught: what `visit` catches; a run that stays."""
    from selenium.webdriver.common.by import By

    path = tmp_path / "page.html"
    if which == "analyze":
        path.write_text(html(example(), content_of(example())))
    else:
        path.write_text(probe_page.html(probed()))
    plots = visit(path, width)
    assert "bad" not in browser.title
    assert len(plots) == (4 if which == "analyze" else 2)
    first = browser.find_element(By.CSS_SELECTOR, 'figure[data-chart] input[data-choice="arm"][value="gpt"]')
    browser.execute_script("arguments[0].click()", first)
    of_first = "return document.querySelector('figure[data-chart] .plot').querySelectorAll('.mark').length"
    assert browser.execute_script(of_first) == plots[0][1] // 2
