from pathlib import Path

import pytest

from ngpt_train.verbs import train
from tests.processes.runs import write_corpus


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the forks of fork_server.py. A module's fixtures, which come before this one, do draw them."""
    monkeypatch.setattr(train, "plot_run", lambda directory: None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")
