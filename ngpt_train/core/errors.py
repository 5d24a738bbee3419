"""The two errors of a user's mistake, and which rank tells it. The command line exits with their `exit_code`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A mistake in the configuration. The message names the key, its value, what is allowed and the fix."""

    exit_code = 2


class DataError(ValueError):
    """Data, a tokenizer or a checkpoint cannot be used as configured. The message names the file and the fix."""

    exit_code = 3


def in_one_line(error: BaseException) -> str:
    """The error's type and the first line of its text; of a long line 500 characters."""
    line = (str(error).strip().splitlines() or ["no text"])[0].strip()
    return f"{type(error).__name__}: {line if len(line) <= 500 else f'{line[:500]}...'}"


def told_by_rank_0(error: Exception) -> Exception:
    """The error, which all ranks have: only rank 0 tells it."""
    error.__dict__["told_by"] = "RANK"
    return error


@contextmanager
def same_on_host() -> Iterator[None]:
    """Inside, all ranks of a host make the same mistake, from the same files: only the first tells it."""
    try:
        yield
    except (ConfigError, DataError) as error:
        error.__dict__["told_by"] = "LOCAL_RANK"
        raise


def is_told_here(error: BaseException) -> bool:
    told_by = error.__dict__.get("told_by")
    number = "0" if told_by is None else os.environ.get(told_by, "0")
    return number == "0" or not number.isdigit()
