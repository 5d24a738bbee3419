"""`data.mixture`: several sources in one line of text, or a line each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ngpt_train.config.sections.data import DataConfig
from ngpt_train.core.errors import ConfigError

KINDS = {
    "embedded": "",
    "local": "a file, directory or glob",
    "tokens": "a directory of shards",
    "hf": "OWNER/NAME or OWNER/NAME@REVISION",
}
FORM = (
    "Write NAME WEIGHT KIND WHERE, with ; or a line break between sources: "
    "data.mixture='web 0.7 local web/; books 0.3 tokens books/'"
)


class SourceConfig(NamedTuple):
    """A source of a mixture: its name, its share of all rows, and where its rows come from."""

    name: str
    share: float
    data: DataConfig


def mixture_of(data: DataConfig) -> list[SourceConfig]:
    """The sources of `data.mixture`, their shares adding up to 1. Raises ConfigError."""
    lines = [line.strip() for line in re.split(r"[;\n]", data.mixture or "") if line.strip()]
    if len(lines) < 2:
        raise ConfigError(f"data.mixture={data.mixture or 'null'}: a mixture has two sources or more\n  {FORM}")
    sources = [_source(line, data) for line in lines]
    names = [source.name for source in sources]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"data.mixture: {min(twice)} is the name of two sources\n  {FORM}")
    total = math.fsum(source.share for source in sources)
    return [source._replace(share=source.share / total) for source in sources]


def is_commit(revision: str) -> bool:
    """Whether `revision` is the hash of a commit, and not a branch or tag, which may move."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def commits_of(data: DataConfig) -> dict[str, str | None]:
    """The revision of each data set of the hub, by the name of its source; without a mixture that name is empty."""
    if data.kind == "mixture":
        return {source.name: source.data.revision for source in mixture_of(data)}
    return {"": data.revision}


def with_commits(data: DataConfig, commits: Mapping[str, str | None]) -> DataConfig:
    """`data` with these commits, named as by `commits_of`, where it names no revision, or a branch, which moves."""

    def commit(revision: str | None, name: str) -> str | None:
        return revision if revision and is_commit(revision) else commits.get(name) or revision

    if data.on_hub:
        return replace(data, revision=commit(data.revision, ""))
    if data.kind != "mixture":
        return data
    parts = re.split(r"(\s*[;\n]\s*)", data.mixture or "")
    for index, line in enumerate(parts):
        name, _, kind, where = (*line.split(maxsplit=3), "", "", "", "")[:4]
        revision = where.partition("@")[2]
        if kind == "hf" and (found := commit(revision, name)):
            parts[index] = f"{line.rstrip().removesuffix(f'@{revision}')}@{found}"
    return replace(data, mixture="".join(parts))


def _source(line: str, data: DataConfig) -> SourceConfig:
    name, weight, kind, where = (*line.split(maxsplit=3), "", "", "", "")[:4]
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise _mistake(line, f"a name of letters, digits, - and _ comes first, not {name!r}")
    try:
        share = float(weight)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1e9:
        raise _mistake(line, f"a weight above 0 and up to 1e9 follows the name, not {weight!r}")
    if kind not in KINDS:
        raise _mistake(line, f"{kind!r} is none of the kinds {', '.join(KINDS)}")
    if bool(where) != bool(KINDS[kind]):
        raise _mistake(line, f"{kind} needs {KINDS[kind]}" if KINDS[kind] else f"{kind} reads no path")
    own = replace(data, kind=kind, mixture=None, path=None)
    if kind == "hf":
        repo, _, revision = where.partition("@")
        own = replace(own, repo=repo, revision=revision or None)
    elif where:
        own = replace(own, path=where)
    if kind == "tokens":
        own = replace(own, streaming=False)
    return SourceConfig(name, share, own)


def _mistake(line: str, problem: str) -> ConfigError:
    return ConfigError(f"data.mixture: in '{line}' {problem}\n  {FORM}")
