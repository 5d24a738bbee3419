"""Whether all hosts run the same: Python, torch, CUDA, this package and the files of it, and the same configuration."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ngpt_train
from ngpt_train.config import to_dict
from ngpt_train.config.schema import Config
from ngpt_train.core.secrets import redacted
from ngpt_train.doctor.bounded import Report
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Answer, Finding, Place, different, in_words, unchecked
from ngpt_train.training.provenance import git_commit

# Where hosts differ in one of these, their numbers differ, or they do not understand each other.
MUST_AGREE = {
    "ngpt_train": "install the same version on all hosts",
    "commit": "check out the same commit on all hosts",
    "code": "copy the same files to all hosts: the package's source or its configs differ",
    "torch": "install the same torch on all hosts",
    "CUDA": "install the same build of torch on all hosts",
    "NCCL": "install the same NCCL on all hosts (pip install -U to one version), else the first collective fails",
    "triton": "install the same triton on all hosts",
}
MAY_DIFFER = {
    "python": "use one Python on all hosts: data=embedded is the Python's own library, and differs with it",
    "cuDNN": "install the same cuDNN on all hosts",
    "numpy": "install the same numpy on all hosts",
}


def look(config: Config, report: Report) -> None:
    """Versions, on the first rank of each host."""
    cuda = torch.version.cuda is not None
    report(
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=_version("numpy"),
        triton=_version("triton"),
        CUDA=torch.version.cuda,
        cuDNN=torch.backends.cudnn.version() if cuda else None,
        NCCL=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        ngpt_train=ngpt_train.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )
    report(code=code_hash())
    report(config=flat(redacted(to_dict(config))))
    report(commit=git_commit())


def code_hash() -> str:
    """Identifies the files of the package and its configs, whether they are committed or not."""
    package = Path(ngpt_train.__file__).parent
    configs = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    digest = hashlib.sha256()
    for root, pattern in ((package, "*.py"), (configs, "*.yaml")):
        for path in sorted(root.rglob(pattern)):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def flat(tree: dict[str, Any], before: str = "") -> dict[str, str]:
    """The values of a tree, as text, by their names with dots."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = str(value)
    return found


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Differences between hosts, and what all have."""
    everybody = [answer.place for answer in answers]
    agreed: list[str] = []
    for name, remedy in {**MUST_AGREE, **MAY_DIFFER}.items():
        usual, others = different(answers, name)
        verdict = WRONG if name in MUST_AGREE else WARNING
        if name == "commit" and not different(answers, "code")[1]:
            verdict = WARNING  # another name for the same files
        for value, places in others.items():
            yield _difference(name, value, usual, places, everybody, verdict, remedy)
        if not others and usual is not None and name not in ("commit", "code"):
            agreed.append(f"{name} {usual}")
    if agreed:
        yield Finding("versions", ", ".join(agreed))
    yield from _code(answers)
    for name in sorted({name for answer in answers for name in answer.facts.get("config", {})}):
        values = [Answer(a.place, {name: a.facts["config"].get(name)}) for a in answers if "config" in a.facts]
        usual, others = different(values, name)
        for value, places in others.items():
            remedy = "start all ranks with the same command, and the same YAML files"
            yield _difference(name, value, usual, places, everybody, WRONG, remedy, check="config")
    for answer in answers:
        if answer.problem:
            remedy = "run `git status` there: it must answer at once"
            yield unchecked("versions", answer.problem, remedy)


def _code(answers: Sequence[Answer]) -> Iterator[Finding]:
    commit, others = different(answers, "commit")
    code, _ = different(answers, "code")
    if others or code is None:
        return
    if commit is None:
        yield Finding("code", f"no git checkout; the files of ngpt_train have the hash {code}")
    elif commit.endswith("+"):
        remedy = "commit the changes, so that run.json names the code that ran"
        yield Finding("code", f"commit {commit[:12]} with uncommitted changes", WARNING, remedy)
    else:
        yield Finding("code", f"commit {commit[:12]}, unchanged", OK)


def _difference(
    name: str,
    value: Any,
    usual: Any,
    places: Sequence[Place],
    everybody: Sequence[Place],
    verdict: str,
    remedy: str,
    check: str = "versions",
) -> Finding:
    others = [place for place in everybody if place not in places]
    rest = in_words(others, everybody) if len(others) <= 4 else "the others"
    found = f"{name} is {_short(value)} here, and {_short(usual)} on {rest}"
    return Finding(check, found, verdict, remedy, where=tuple(places))


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
