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
