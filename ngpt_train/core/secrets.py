"""Removes secrets from what leaves: files that others may read, services, the standard streams."""

import io
import os
import re
import shlex
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

REDACTED = "<redacted>"
# What is named so, an environment variable or a part of a URL's query, holds a secret. PWD is the current directory.
_NAME = r"KEY|TOKEN(?!IZ)|SECRET|PASS|CREDENTIAL|COOKIE|SIGNATURE|(^|_)(PW|PAT|AUTH|SIG)$|_PWD$"
_SECRET_VARIABLE = re.compile(_NAME, re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=:/)(/?)[^/\s]+@")  # pathlib leaves one slash
_URL_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s]+)")
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
    """The message of an error without secrets, and with noted environment variables by their names."""
    for held in sorted(_variables, key=len, reverse=True):
        message = message.replace(held, f"${_variables[held]}")
    return str(redacted(message))


def redacted(value: Any, harmless: Container[str] = ()) -> Any:
    """A copy of `value`, a text or a tree of texts and numbers, with REDACTED in the place of secrets. Secrets are:
    what an environment variable holds that is named like one (HF_TOKEN), wherever it stands in a text, unless it is in
    `harmless`; the login in a URL; and a part of its query that is named like one."""
    found = {held for name, held in os.environ.items() if _SECRET_VARIABLE.search(name) and held not in harmless}
    # A proxy may be named without http://, by which _URL_LOGIN knows a login.
    found |= {held.rpartition("@")[0] for name, held in os.environ.items() if name.lower().endswith("_proxy")}
    secrets = sorted((held for held in found if len(held) >= _SHORTEST_SECRET), key=len, reverse=True)

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: clean(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(inner) for inner in value]
        if not isinstance(value, str):
            return value
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        return _URL_QUERY.sub(_query, _URL_LOGIN.sub(rf"\1{REDACTED}@", value)) if "/" in value else value

    return clean(value)


def _query(part: re.Match[str]) -> str:
    name, value = part.groups()
    return f"{name}={REDACTED if _SECRET_VARIABLE.search(name.replace('-', '_')) else value}"


def command_of(verb: str, arguments: Iterable[str]) -> str:
    """The command line of a verb, which can be pasted, without the secrets in its words."""
    return shlex.join(["python", "-m", "ngpt_train", verb, *map(redacted, arguments)])


class _Guarded(io.TextIOWrapper):
    def write(self, text: str) -> int:
        return super().write(redacted(text))


def guard_streams() -> None:
    """Redacts all that this process prints from now on, tracebacks and the log included."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # None where the shell has closed it: `>&-`
            encoding, errors, by_line = stream.encoding, stream.errors, stream.line_buffering
            setattr(sys, name, _Guarded(stream.detach(), encoding, errors, line_buffering=by_line))
