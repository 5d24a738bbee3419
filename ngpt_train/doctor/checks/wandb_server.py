"""Weights & Biases: the package, the key, and the connection to the server."""

import base64
import json
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from ngpt_train.config.schema import Config
from ngpt_train.doctor.bounded import Report, first_line
from ngpt_train.doctor.findings import WARNING, Answer, Finding, unchecked

SECONDS = 5.0  # for an answer of the server
SERVER = "https://api.wandb.ai"
WHO = {"query": "query { viewer { username } }"}
LATER = "or set logging.wandb.mode=offline, and `wandb sync` later"


def look(config: Config, report: Report) -> None:
    """Asks the server for the owner of the key. On rank 0 alone, which logs."""
    mode = config.logging.wandb.used_mode
    if mode == "disabled":
        return
    server = os.environ.get("WANDB_BASE_URL", SERVER).rstrip("/")
    key = key_for(server)
    report(installed=find_spec("wandb") is not None, server=server, key=key is not None)
    if mode == "offline" or key is None:
        return
    login = base64.b64encode(f"api:{key}".encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    request = urllib.request.Request(f"{server}/graphql", json.dumps(WHO).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            viewer = (json.load(answer).get("data") or {}).get("viewer")
        report(accepted=viewer is not None)
    except urllib.error.HTTPError as error:
        report(**({"accepted": False} if error.code in (401, 403) else {"unreachable": f"HTTP {error.code}"}))
    except (OSError, ValueError) as error:
        report(unreachable=first_line(error))


def key_for(server: str) -> str | None:
    """wandb's key: WANDB_API_KEY, or the entry of `wandb login` in ~/.netrc."""
    if key := os.environ.get("WANDB_API_KEY"):
        return key
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            found = path and netrc.netrc(Path(path).expanduser()).authenticators(urlsplit(server).hostname or "")
        except (OSError, netrc.NetrcParseError):
            continue
        if found:
            return found[2]
    return None


def judge(config: Config, answer: Answer) -> Iterator[Finding]:
    """Will the run log online, offline or not at all? Never `wrong`: a run goes on without wandb."""
    facts, mode = answer.facts, config.logging.wandb.used_mode
    if answer.problem:
        yield unchecked("wandb", answer.problem, f"look whether its server answers, {LATER}")
    elif mode == "disabled":
        yield Finding("wandb", f"off (logging.wandb.mode={config.logging.wandb.mode})")
    elif not facts["installed"]:
        yield Finding("wandb", "the package is not installed", WARNING, "pip install wandb")
    elif mode == "offline":
        yield Finding("wandb", "offline, as logging.wandb.mode or WANDB_MODE says")
    elif not facts["key"]:
        found = f"mode {mode}, and there is no key, so the run logs offline"
        yield Finding("wandb", found, WARNING, f"`wandb login`, or set WANDB_API_KEY on the host of rank 0, {LATER}")
    elif "unreachable" in facts:
        found = f"mode {mode}, and {facts['server']} does not answer ({facts['unreachable']}), so the run logs offline"
        yield Finding("wandb", found, WARNING, f"open the way to it (a proxy: https_proxy), {LATER}")
    elif not facts["accepted"]:
        found = f"mode {mode}, and {facts['server']} does not accept the key"
        yield Finding("wandb", found, WARNING, f"`wandb login --relogin`, {LATER}")
    else:
        yield Finding("wandb", f"mode {mode}, {facts['server']} accepts the key")
