"""A browser for the tests of pages; no process group that outlives a file of tests."""

import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_process_group_afterwards() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")  # not imported here: many tests need no torch
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """A run does not draw its curves at its end, which takes a third of a short run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngpt_train.verbs.train.plot_run", lambda directory: None)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium that logs its console and its network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ["headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking"]:
        options.add_argument(f"--{argument}")
    for argument in ["disable-component-update", "disable-sync", "no-first-run", "hide-scrollbars"]:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    from selenium.webdriver.chrome.service import Service

    socket.setdefaulttimeout(120)  # selenium, which has none of its own, takes this one
    try:
        opened = webdriver.Chrome(options=options, service=Service(driver))
    finally:
        socket.setdefaulttimeout(None)
    opened.set_script_timeout(60)
    yield opened
    opened.quit()


@pytest.fixture
def visit(browser: Any) -> Callable[..., list[list[Any]]]:
    """Opens a page, and waits until its figures are drawn."""

    def open_page(path: Path, width: int = 1280, dark: bool = False) -> list[list[Any]]:
        """Returns (name of the figure, marks, shapes, width) of each plot. Fails for an error in the script, a request,
        a page wider than the screen, an empty plot."""
        from selenium.webdriver.support.ui import WebDriverWait

        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get(path.as_uri())
        WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
        assert not [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        plots: list[list[Any]] = browser.execute_script(
            """return [...document.querySelectorAll('figure[data-chart] .plot')].map((plot) => [
                 plot.closest('figure').dataset.chart, plot.querySelectorAll('.mark').length,
                 plot.querySelectorAll('.mark > *').length, plot.querySelector('svg').getBoundingClientRect().width])"""
        )
        for _, marks, shapes, wide in plots:
            assert marks > 0
            assert shapes > 0
            assert 100 < wide <= width
        return plots

    return open_page
