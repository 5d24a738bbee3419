"""Removes secrets from what is written into files that others may read."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping
from typing import Any

REDACTED = "<redacted>"
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(^|_)(api_?key|access_?key|password|passwd|secret|token|credentials?)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s]+@")
# In characters. A shorter value of an environment variable (1, true, debug) would redact ordinary words.
_SHORTEST_SECRET = 6


_variables: dict[str, str] = {}  # the names of environment variables whose values a config has, by these values


def note_variables(text: str) -> None:
    """Notes which environment variables a value such as ${oc.env:NAME} reads, for `without_variables`."""
    for name in re.findall(r"oc\.env:\s*(\w+)", text):
        while (held := os.environ.get(name, "")) and held not in _variables:
            _variables[held] = name
            name = held  # of ${oc.env:${oc.env:NAME}}


def without_variables(message: str) -> str:
    """The message with the names of noted environment variables in the place of what they hold."""
    for held in sorted(_variables, key=len, reverse=True):
        message = message.replace(held, f"${_variables[held]}")
    return message


def redacted(tree: Mapping[str, Any], harmless: Container[str] = ()) -> dict[str, Any]:
    """A copy of `tree` with REDACTED in the place of secrets.

    Secrets are: the value of a key that is named like a secret (api_key, password); the value of an environment
    variable that is named like one (HF_TOKEN), wherever it stands in a text, unless it is in `harmless`; and the login
    in a URL.
    """
    values = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name) and value not in harmless}
    secrets = sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)

    def clean(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: clean(str(inner), x) for inner, x in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(name, x) for x in value]
        if not isinstance(value, str) or not value:
            return value
        if _SECRET_KEY.search(name):
            return REDACTED
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        return _URL_LOGIN.sub(f"{REDACTED}@", value)

    return {name: clean(str(name), value) for name, value in tree.items()}
