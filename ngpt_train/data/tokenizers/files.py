"""Where model files come from: a path, an installed package, a download that may not take for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ngpt_train.core.errors import DataError

DOWNLOAD_SECONDS = 30.0
Result = TypeVar("Result")


class DownloadError(Exception):
    """Why a download has come to nothing."""


def read_file(path: str) -> bytes:
    """The content of tokenizer.path. Raises DataError."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer.path={path}: cannot be read ({error.strerror})") from None


def package_file(package: str, name: str) -> Path | None:
    """A file inside an installed package, which is not imported; None where it is not installed."""
    spec = find_spec(package)
    for place in spec.submodule_search_locations or [] if spec is not None else []:
        if (path := Path(place, name)).is_file():
            return path
    return None


def within_deadline(download: Callable[[], Result]) -> Result:
    """What `download` returns. Raises DownloadError if it fails, or takes longer than DOWNLOAD_SECONDS: neither
    tiktoken's requests nor the hub's retries have an end of their own that a user would wait for."""
    result: list[Result] = []
    problem = f"no answer in {DOWNLOAD_SECONDS:g} s"

    def run() -> None:
        nonlocal problem
        try:
            result.append(download())
        except Exception as error:
            problem = type(error).__name__

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if not result:
        raise DownloadError(problem)
    return result[0]
