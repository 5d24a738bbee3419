"""A browser for the tests of pages; no process group that outlives a file of tests."""

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_process_group_afterwards() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")  # not imported here: many tests need no torch
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


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

    opened = webdriver.Chrome(options=options, service=Service(driver))
    opened.set_script_timeout(60)
    yield opened
    opened.quit()
