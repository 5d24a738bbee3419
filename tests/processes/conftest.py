import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ngpt_train.verbs import train as train_verb
from tests.processes.runs import arguments, numbers, train, write_corpus


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the forks of fork_server.py. A module's fixtures, which come before this one, do draw them."""
    monkeypatch.setattr(train_verb, "plot_run", lambda directory: None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of 12 steps that nothing happens to."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    train(arguments(directory, corpus))
    losses, norms, *_ = zip(*numbers(directory / "runs/test").values(), strict=True)
    assert losses[-1] < 0.95 * losses[0]
    assert max(norms) > 1.0, "never clipped"
    return directory / "runs/test"


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The directory of a run of 4 steps with checkpoints at 2 and 4."""
    directory = tmp_path_factory.mktemp("four_steps")
    train(arguments(directory, corpus, "train.steps=4", "checkpoint.every=2"))
    shutil.rmtree(directory / "cache")
    return directory


@pytest.fixture
def directory(four_steps: Path, tmp_path: Path) -> Path:
    """A copy of that directory, free to be damaged."""
    shutil.copytree(four_steps, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 24 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"mounting a disk is not allowed here: {made.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)
