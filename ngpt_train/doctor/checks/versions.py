"""Do all hosts have the same Python, torch, CUDA, files of this package, and configuration?"""

import hashlib
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

import ngpt_train
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import to_dict
from ngpt_train.config.validate import flatten
from ngpt_train.config.yaml_files import config_dir
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.secrets import redacted
from ngpt_train.doctor.bounded import Report
from ngpt_train.doctor.findings import WARNING, WRONG, Answer, Finding, differences, different, unchecked

# A difference in one of these changes numbers, or breaks collectives.
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
    """On the first rank of each host."""
    on_cuda = torch.version.cuda is not None
    report(
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=_version("numpy"),
        triton=_version("triton"),
        CUDA=torch.version.cuda,
        cuDNN=torch.backends.cudnn.version() if on_cuda else None,
        NCCL=".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
        ngpt_train=ngpt_train.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )
    report(code=code_hash())
    report(config={name: str(value) for name, value in flatten(redacted(to_dict(config)), ())})
    report(commit=git_commit())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_hash() -> str:
    """A hash of the package's files and configs, committed or not."""
    digest = hashlib.sha256()
    for root, pattern in ((Path(ngpt_train.__file__).parent, "*.py"), (config_dir(), "*.yaml")):
        for path in sorted(root.rglob(pattern)):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Differences between hosts, and the common versions."""
    agreed: list[str] = []
    for name, remedy in {**MUST_AGREE, **MAY_DIFFER}.items():
        usual, others = different(answers, name)
        same_files = name == "commit" and not different(answers, "code")[1]
        verdict = WRONG if name in MUST_AGREE and not same_files else WARNING
        yield from differences(answers, name, "versions", verdict, remedy)
        if not others and usual is not None and name not in ("commit", "code"):
            agreed.append(f"{name} {usual}")
    if agreed:
        yield Finding("versions", ", ".join(agreed))
    yield from _code(answers)
    configs = [Answer(answer.place, answer.facts["config"]) for answer in answers if "config" in answer.facts]
    for name in sorted({name for answer in configs for name in answer.facts}):
        remedy = "start all ranks with the same command, and the same YAML files"
        yield from differences(configs, name, "config", WRONG, remedy)
    for answer in answers:
        if answer.problem:
            remedy = "run `git status` there: it must answer at once"
            yield unchecked("versions", answer.problem, remedy, where=(answer.place,))


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
        yield Finding("code", f"commit {commit[:12]}, unchanged")
