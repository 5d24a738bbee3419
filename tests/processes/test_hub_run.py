"""A run on a data set of the hub, whose server fails now and then, sees the tokens of one on the same files here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hub_server
from tests.hub_server import Hub
from tests.processes.runs import arguments, forked, start, starts, train, wait_for_step, write_parquet_shards
from tests.processes.test_streaming import STREAMED, data_hashes
from tests.processes.test_torchrun import kill


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_parquet_shards(tmp_path / "text", (30, 9, 60, 21, 40))


@pytest.fixture
def hub(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {f"data/{path.name}": path.read_bytes() for path in sorted(text.iterdir())}
    with hub_server.serving(Hub("someone/pages", files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def on_hub(tmp_path: Path, *overrides: str) -> list[str]:
    given = arguments(tmp_path, tmp_path, "data=hf", "data.repo=someone/pages", *STREAMED, *overrides)
    return [argument for argument in given if not argument.startswith("data.path=")]


@pytest.mark.slow
def test_killed_while_the_server_fails(hub: Hub, text: Path, tmp_path: Path) -> None:
    train(arguments(tmp_path / "here", text, *STREAMED, "train.steps=20"))
    hub.faults += [hub_server.dropped(300), hub_server.altered, hub_server.status(429, **{"Retry-After": "1"})]
    given = on_hub(tmp_path / "hub", "train.steps=20", "checkpoint.every=3")
    directory = tmp_path / "hub/runs/test"
    process = start(given, ranks=2)
    wait_for_step(directory, 5)
    kill(process)
    hub.revisions["main"] = "f" * 40  # what is newest now is not what the run began with
    assert forked("train", given).returncode == 0
    assert not hub.faults
    assert len(starts(directory)) == 2
    assert data_hashes(directory) == data_hashes(tmp_path / "here/runs/test")
    fetched = [request.path for request in hub.contents() if request.start is None]
    assert len(fetched) <= len(hub.files) + 3, "a shard was fetched by two processes"


@pytest.mark.slow
def test_a_mixture_goes_on_with_its_commits(hub: Hub, text: Path, tmp_path: Path) -> None:
    """Also where the hub cannot be asked. Caught: a branch that is resolved again, and other text with it."""
    given = on_hub(tmp_path, "data=mixture", f"data.mixture=web 2 hf someone/pages@main; here 1 local {text}")
    given = [argument for argument in given if not argument.startswith("data.repo=")]
    assert forked("train", [*given, "train.stop_at=4"]).returncode == 0
    directory = tmp_path / "runs/test"
    assert f"someone/pages@{hub_server.COMMIT}; here" in (directory / "config.yaml").read_text()
    hub.revisions["main"] = "f" * 40
    hub.api_faults += [hub_server.status(404)]
    finished = forked("train", given)
    assert finished.returncode == 0, finished.stderr
    assert not hub.api_faults
    assert f"data.revision=main of web: the run goes on with {hub_server.COMMIT}, as it began" in finished.stderr


def test_unreachable_shard_ends_the_run(hub: Hub, tmp_path: Path) -> None:
    hub.faults += [hub_server.status(503)] * 100
    finished = forked("train", on_hub(tmp_path, "data.fetch_minutes=0.05"))
    assert finished.returncode == 3, finished.stdout
    assert "someone/pages@" in finished.stderr
    assert "data.fetch_minutes above 0.05" in finished.stderr
    assert "Traceback" not in finished.stderr
