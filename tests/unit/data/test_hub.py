"""The hub: the right files of the right commit, every document through every fault of a network, and an end to it."""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import errno
import gzip
import json
import logging
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ngpt_train.config import load_config
from ngpt_train.config.schema import DataConfig
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.shard_cache import ShardCache
from ngpt_train.data.sources import hub_client
from ngpt_train.data.sources.hub import HubText, list_hub
from ngpt_train.data.sources.source import FetchError, Source
from tests import hub_server
from tests.hub_server import COMMIT, Fault, Hub, blob_id, serving, sha256

ROOT = Path(__file__).parents[3]
REPO = "someone/some-text"
TEXTS = {
    "plain_text/train-00000-of-00002.parquet": [f"parquet {i}: naïve 😀\r\n" * (i % 7) for i in range(700)],
    "plain_text/train-00001-of-00002.jsonl.gz": [f"line {i * i * 7919 % 10007}\u2028\t" * 3 for i in range(400)],
    "plain_text/train-small.jsonl": ["a file that git itself keeps"],
}


def content(name: str, texts: list[str], directory: Path, field: str = "text") -> bytes:
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = directory / "written.parquet"
        pq.write_table(pa.table({"id": range(len(texts)), field: texts}), path, row_group_size=100)
        return path.read_bytes()
    data = "".join(json.dumps({field: text}) + "\n" for text in texts).encode()
    return gzip.compress(data) if name.endswith(".gz") else data


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with TEXTS, known to this process as the only one, and tried again without long waits."""
    files = {name: content(name, texts, tmp_path) for name, texts in TEXTS.items()}
    with serving(Hub(REPO, {**files, "README.md": b"# Some text", ".gitattributes": b""})) as hub:
        known_to(hub.address, tmp_path, monkeypatch)
        yield hub
    huggingface_hub.close_session()


def known_to(address: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HOME", str(home))  # where lists of files are kept
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(hub_client, "FIRST_WAIT", 0.01)
    huggingface_hub.close_session()  # made anew, without the proxies of the environment


def options(**keys: object) -> DataConfig:
    return DataConfig(kind="hf", **{"repo": REPO, "revision": "main", "fetch_minutes": 0.2, **keys})  # type: ignore[arg-type]


def read(listing: Source, scratch: Path, index: int = 0) -> list[str]:
    scratch.mkdir(exist_ok=True)
    try:
        return list(listing.reader.documents(listing.shards[index], scratch))
    finally:
        assert list(scratch.iterdir()) == []


# --- lists of files


@pytest.mark.parametrize("page", [1000, 2])
def test_listing_is_complete_and_in_a_fixed_order(hub: Hub, page: int) -> None:
    hub.page = page
    listing = list_hub(options())
    assert listing.revision == COMMIT
    assert isinstance(listing.reader, HubText)
    assert [shard.files for shard in listing.shards] == [(name,) for name in sorted(TEXTS)]
    assert listing.shards[0].name == f"{REPO}@{COMMIT}:{next(iter(TEXTS))}"
    for (path, file), shard in zip(listing.reader.files.items(), listing.shards, strict=True):
        data = hub.files[path]
        large = len(data) >= hub.large
        assert file == (len(data), sha256(data) if large else blob_id(data))
        assert file.etag in shard.identity
        assert str(file.size) in shard.identity
    assert sum(len(data) >= hub.large for data in hub.files.values()) == 2, "both kinds of hashes are here"
    # The commit, then page by page; directories are entries as well.
    assert len(hub.requests) == 1 + -(-(len(hub.files) + 1) // page)
    assert list_hub(options()) == listing
    assert pickle.loads(pickle.dumps(listing)) == listing


@pytest.mark.parametrize("revision", [None, "refs/convert/parquet"])
def test_revision_becomes_a_commit(hub: Hub, revision: str | None) -> None:
    hub.revisions["refs/convert/parquet"] = COMMIT
    hub.revisions["main"] = COMMIT
    assert list_hub(options(revision=revision)).revision == COMMIT
    assert hub.requests[0].path == f"/api/datasets/{REPO}" + (f"/revision/{revision}" if revision else "")


def test_new_content_is_a_new_identity(hub: Hub, tmp_path: Path) -> None:
    before = list_hub(options()).shards
    name = sorted(TEXTS)[0]
    hub.files[name] = content(name, ["another"], tmp_path)
    after = list_hub(options()).shards
    assert [a.identity == b.identity for a, b in zip(before, after, strict=True)] == [False, True, True]


def test_equal_content_is_decoded_once_unless_it_is_read_in_another_way(hub: Hub) -> None:
    hub.files = dict.fromkeys(("a.jsonl", "b.jsonl", "c.jsonl.gz"), b"{}")
    a, b, c = (shard.identity for shard in list_hub(options()).shards)
    assert a == b != c


OWT = [f"plain_text/train-{i:05d}-of-00080.parquet" for i in range(3)]
SEVERAL = ["a/train-0.parquet", "a/test-0.parquet", "b/train/0.jsonl.zst", "b/validation/0.jsonl.gz", "constraints.csv"]
NO_SPLIT = ["data/CC-MAIN-2013-20/000_00000.parquet", "sample/10BT/000.parquet", "trained/on.parquet", "LICENSE.txt"]
DIGITS = ["train1.jsonl", "2train.jsonl", "TRAIN.jsonl", "strain.jsonl", "train_sft.jsonl", "dev10.jsonl", "dev1.jsonl"]


@pytest.mark.parametrize(
    ("names", "keys", "expected"),
    [
        ([*OWT, "README.md"], {}, OWT),
        (SEVERAL, {}, ["a/train-0.parquet", "b/train/0.jsonl.zst"]),
        (SEVERAL, {"split": "validation"}, ["b/validation/0.jsonl.gz"]),
        (SEVERAL, {"files": "a/*"}, ["a/test-0.parquet", "a/train-0.parquet"]),
        (SEVERAL, {"files": "*0.jsonl*"}, ["b/train/0.jsonl.zst", "b/validation/0.jsonl.gz"]),
        (NO_SPLIT, {}, NO_SPLIT[:3]),
        (NO_SPLIT, {"files": "sample/10BT/*"}, NO_SPLIT[1:2]),
        (DIGITS, {}, ["2train.jsonl", "TRAIN.jsonl", "train1.jsonl", "train_sft.jsonl"]),
        (DIGITS, {"split": "train_sft"}, ["train_sft.jsonl"]),
        (DIGITS, {"split": "dev1"}, ["dev1.jsonl"]),
    ],
)
def test_files_of_a_split(hub: Hub, names: list[str], keys: dict[str, str], expected: list[str]) -> None:
    hub.files = {name: name.encode() for name in names}
    assert [shard.files[0] for shard in list_hub(options(**keys)).shards] == expected


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_several_configurations_are_said(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.files = dict.fromkeys(SEVERAL, b"")
    list_hub(options())
    assert "a/*.parquet, b/train/*.jsonl.zst; data.files=GLOB" in caplog.text
    caplog.clear()
    hub.files = dict.fromkeys(OWT, b"")
    list_hub(options())
    assert not warnings_in(caplog)


@pytest.mark.parametrize(
    ("names", "keys", "parts"),
    [
        (["a.csv", "b.csv", "train.txt", ".gitattributes"], {}, ["2 .csv", "1 .txt", "prepare", "data=tokens"]),
        ([], {}, ["nothing"]),
        (OWT, {"split": "test"}, ["data.split=test", "train", OWT[0], "data.files"]),
        (["test.jsonl"], {}, ["data.split=train", "test"]),
        (NO_SPLIT, {"split": "test"}, ["data.split=test", "without a split"]),
        (OWT, {"files": "*.jsonl"}, ["data.files=*.jsonl", OWT[0]]),
    ],
)
def test_nothing_to_read(hub: Hub, names: list[str], keys: dict[str, str], parts: list[str]) -> None:
    hub.files = {name: name.encode() for name in names}
    with pytest.raises(DataError) as caught:
        list_hub(options(**keys))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "status", "headers", "parts"),
    [
        ({"repo": "someone/nothing"}, None, {}, ["someone/nothing", "404", "data.repo", "/datasets/someone/nothing"]),
        ({"revision": "v9"}, None, {}, [REPO, "data.revision=v9", "no such commit, branch or tag"]),
        ({}, 401, {}, ["401", "no token was sent", "HF_TOKEN", "private or gated"]),
        ({}, 403, {"X_Error_Code": "GatedRepo"}, ["403", "accept the terms", "HF_TOKEN"]),
        ({}, 451, {}, ["451", "data.repo"]),
    ],
)
def test_refusals_at_the_start(
    hub: Hub, keys: dict[str, str], status: int | None, headers: dict[str, str], parts: list[str]
) -> None:
    if status is not None:
        hub.api_faults.append(hub_server.status(status, **headers))
    with pytest.raises(FetchError) as caught:
        list_hub(options(**keys))
    for part in parts:
        assert part in str(caught.value)
    assert len(hub.requests) == 1


@pytest.mark.parametrize("repo", [None, "", "https://huggingface.co/datasets/a/b", "a/b/c", "a b"])
def test_no_name_of_a_data_set(hub: Hub, repo: str | None) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"data.repo={'null' if repo is None else repo}: expected OWNER")):
        list_hub(options(repo=repo))
    assert not hub.requests


def test_listing_is_tried_again(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.api_faults += [hub_server.status(503), hub_server.status(429, Retry_After="0"), hub_server.unanswered]
    hub.api_faults += [lambda handler, data, start: hub_server.stalled(0)(handler, b"[]", 0)]
    assert len(list_hub(options(files="*.parquet")).shards) == 1
    assert len(hub.requests) == 4 + 2
    assert len(warnings_in(caplog)) == 4
    assert "HTTP 503" in caplog.text
    assert "attempt 4 failed, the next one in" in caplog.text


def test_list_of_a_commit_is_kept(hub: Hub, tmp_path: Path) -> None:
    """Where the hub fails, a run that goes on can do without. Caught: a branch taken for its earlier commit, a list
    that hides the hub's newer list, half a list."""
    kept = {"cache": str(tmp_path)}
    first = list_hub(options(**kept))
    hub.api_faults += [hub_server.status(404)] * 2
    assert list_hub(options(revision=COMMIT, **kept)) == first
    with pytest.raises(FetchError):
        list_hub(options(revision="main", **kept))
    hub.revisions |= {"main": "f" * 40, "f" * 40: "f" * 40}
    assert list_hub(options(revision="main", **kept)).revision == "f" * 40
    [file] = (tmp_path / "hub").glob(f"*@{COMMIT}.json")
    file.write_bytes(file.read_bytes()[:-5])
    hub.api_faults += [hub_server.status(404)]
    with pytest.raises(FetchError):
        list_hub(options(revision=COMMIT, **kept))


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a user who waits for a hub that a machine cannot reach."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    known_to(address, tmp_path, monkeypatch)
    start = time.monotonic()
    with pytest.raises(FetchError, match=f"no connection to {address}.*after 1 attempt .*data=embedded"):
        list_hub(options(fetch_minutes=10))
    assert time.monotonic() - start < 2


def test_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = list_hub(options())
    n_requests = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match=r"HF_HUB_OFFLINE.*unset it.*data=embedded"):
        list_hub(options())
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE"):
        read(listing, tmp_path / "scratch")
    assert len(hub.requests) == n_requests


@pytest.mark.parametrize("body", [b"<html>Log in to the network", b'{"error": null}', b'["sha"]', b"\xff"])
def test_another_server_is_no_hub(hub: Hub, body: bytes) -> None:
    def another(handler: hub_server.Handler, data: bytes, start: int) -> None:
        handler.answer(200, body)

    hub.api_faults += 100 * [another]
    with pytest.raises(FetchError, match=f"what answers at {hub.address} is no hub"):
        list_hub(options())


def test_endpoint_is_an_address(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example.org")
    with pytest.raises(DataError, match=r"HF_ENDPOINT=mirror.example.org.*https://"):
        list_hub(options())


class Endless:
    """A body of so many bytes, whatever the file has."""

    def __init__(self, most: int) -> None:
        self.sent, self._most = 0, most

    def __call__(self, handler: hub_server.Handler, data: bytes, start: int) -> None:
        handler.start(200, {"Connection": "close"})
        while self.sent < self._most:
            handler.send(bytes(1 << 16))
            self.sent += 1 << 16
        handler.close_connection = True


def test_what_the_hub_s_own_client_cannot_do(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 10. Where one of these fails, the library has learned what `HubClient` is for."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # or it asks huggingface.co for a list
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 5)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)  # longer than a busy machine pauses
    api = huggingface_hub.HfApi(endpoint=hub.address)
    name = "plain_text/train-00000-of-00002.parquet"

    def download(to: str) -> Path:
        return Path(api.hf_hub_download(REPO, name, repo_type="dataset", revision=COMMIT, local_dir=tmp_path / to))

    def are_endless(*calls: Callable[[], object]) -> bool:
        threads = [threading.Thread(target=suppressed, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(3)  # three times HF_HUB_DOWNLOAD_TIMEOUT
        return all(thread.is_alive() for thread in threads)

    def suppressed(call: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            call()

    # The server of these tests is one for it.
    assert api.dataset_info(REPO, revision="main").sha == COMMIT
    tree = api.list_repo_tree(REPO, repo_type="dataset", recursive=True)
    assert {file.path for file in tree if isinstance(file, huggingface_hub.RepoFile)} == set(hub.files)
    assert download("whole").read_bytes() == hub.files[name]
    # Wrong content passes.
    hub.faults.append(hub_server.altered)
    assert download("altered").read_bytes() != hub.files[name]
    # A body without an end is written until the disk is full: 100 MB of a file of 16 KB.
    endless = Endless(100_000_000)
    hub.faults.append(endless)
    suppressed(lambda: download("endless"))
    assert endless.sent >= 100_000_000
    # It waits as long as a server likes.
    waits: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", waits.append)
        hub.faults = [hub_server.status(429, Retry_After="3600")]
        download("asked")
    assert max(waits) >= 3600
    # Nothing ends a wait for a list, or a connection that trickles.
    hub.api_faults = [lambda handler, data, start: hub_server.stalled(0)(handler, b"[]", 0)]
    hub.faults = [hub_server.trickling(0.05)]
    listing = lambda: list(api.list_repo_tree(REPO, repo_type="dataset", recursive=True))  # noqa: E731
    assert are_endless(listing, lambda: download("trickling"))


# --- downloads


FAULTS: list[tuple[str, list[Fault], list[int | None]]] = [
    # Name, faults, and where each request for content begins.
    ("errors", [hub_server.status(code) for code in (408, 429, 500, 502, 503, 504)], [None] * 7),
    ("dropped in the middle", [hub_server.dropped(700), hub_server.dropped(300)], [None, 700, 1000]),
    ("cut", [hub_server.truncated(900)], [None, 900]),
    ("stalled in the middle", [hub_server.stalled(800)], [None, 800]),
    ("dropped, then an error", [hub_server.dropped(700), hub_server.status(503)], [None, 700, 700]),
    ("no ranges", [hub_server.dropped(700), hub_server.without_ranges], [None, 700]),
    ("no such range", [hub_server.dropped(700), hub_server.status(416)], [None, 700, None]),
    ("altered", [hub_server.altered], [None, None]),
    ("altered in the rest", [hub_server.dropped(700), hub_server.altered], [None, 700, None]),
]


@pytest.mark.parametrize(("faults", "starts"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_faults_pass(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, faults: list[Fault], starts: list[int | None]
) -> None:
    listing = list_hub(options())
    hub.faults += faults
    assert read(listing, tmp_path / "scratch") == next(iter(TEXTS.values()))
    assert [request.start for request in hub.contents()] == starts
    assert not hub.faults
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("ngpt_train")]
    passing = [warning for warning in warnings if "failed, the next one in" in warning]
    assert len(passing) == len(starts) - 1, "one line for each attempt that failed"
    assert all(warning.startswith(f"{listing.shards[0].name}: ") for warning in passing)


def test_small_files_are_verified_as_well(hub: Hub, tmp_path: Path) -> None:
    listing = list_hub(options())
    hub.faults += [hub_server.altered, hub_server.truncated(10)]
    assert read(listing, tmp_path / "scratch", 2) == list(TEXTS.values())[2]
    assert len(hub.contents()) == 3


def test_server_is_given_the_time_that_it_asks_for(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = list_hub(options(fetch_minutes=1))
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    date = email.utils.formatdate(time.time() + 7, usegmt=True)
    hub.faults += [hub_server.status(429, Retry_After="2"), hub_server.status(503, Retry_After=date)]
    hub.faults += [hub_server.status(429, RateLimit='"resolvers";r=0;t=3'), hub_server.status(429)]
    assert read(listing, tmp_path / "scratch") == next(iter(TEXTS.values()))
    assert len(hub.contents()) == 5
    # The jitter comes on top. A date has whole seconds.
    assert [low <= wait < low + 1.2 for low, wait in zip((2, 5.9, 3, 0), waits, strict=True)] == 4 * [True], waits


def test_server_asks_for_more_time_than_there_is(hub: Hub, tmp_path: Path) -> None:
    listing = list_hub(options())
    hub.faults.append(hub_server.status(429, Retry_After="3600"))
    start = time.monotonic()
    with pytest.raises(FetchError, match=r"HTTP 429.*after 1 attempt .*3600 s more.*data.fetch_minutes above 0.2"):
        read(listing, tmp_path / "scratch")
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (hub_server.status(503), "HTTP 503"),
        (hub_server.trickling(0.05), r"the time was up after \d+ bytes"),
    ],
)
def test_deadline_holds(hub: Hub, tmp_path: Path, fault: Fault, problem: str) -> None:
    listing = list_hub(options(fetch_minutes=0.01))
    hub.faults += 1000 * [fault]
    start = time.monotonic()
    with pytest.raises(FetchError) as caught:
        read(listing, tmp_path / "scratch")
    assert 0.4 < time.monotonic() - start < 1.5, "0.6 s, and the last read"
    message = str(caught.value)
    assert re.search(problem, message)
    n = len(hub.contents())
    assert f"given up after {n} attempt" in message
    for part in (listing.shards[0].name, "data.fetch_minutes", "data=local"):
        assert part in message


def test_waits_grow(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[float, float]] = []
    monkeypatch.setattr(hub_client, "FIRST_WAIT", 1.0)

    def shortest(low: float, high: float) -> float:
        waits.append((low, high))
        return 0.0

    monkeypatch.setattr(hub_client.JITTER, "uniform", shortest)
    listing = list_hub(options(fetch_minutes=10))
    hub.faults += 9 * [hub_server.status(503)]
    read(listing, tmp_path / "scratch")
    assert waits == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32), (0, 60), (0, 60), (0, 60)]


def test_a_body_without_an_end_does_not_fill_the_disk(hub: Hub, tmp_path: Path) -> None:
    listing = list_hub(options())
    endless = Endless(1 << 27)
    hub.faults.append(endless)
    assert read(listing, tmp_path / "scratch") == next(iter(TEXTS.values()))
    assert endless.sent < 1 << 26, "more than buffers hold"


def test_file_that_is_gone(hub: Hub, tmp_path: Path) -> None:
    listing = list_hub(options(fetch_minutes=10))
    hub.files.clear()
    with pytest.raises(FetchError, match="the file is gone"):
        read(listing, tmp_path / "scratch")


def test_token_stays_with_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token, hub.page = "hf_secret", 2
    with pytest.raises(FetchError, match="no token was sent"):
        list_hub(options())
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(FetchError, match="the token that was sent gives no access"):
        list_hub(options())
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.requests.clear()
    assert read(list_hub(options()), tmp_path / "scratch") == next(iter(TEXTS.values()))
    # Content comes from another host, where the address itself is the permission.
    assert [request.token for request in hub.requests] == (len(hub.requests) - 1) * ["Bearer hf_secret"] + [None]


def test_a_full_disk_is_the_cache_s_business(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listing = list_hub(options(fetch_minutes=10))
    caplog.clear()
    (tmp_path / "file.parquet").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        list(listing.reader.documents(listing.shards[0], tmp_path))
    assert caught.value.errno == errno.ENOSPC
    assert len(hub.contents()) == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert not (tmp_path / "file.parquet").is_symlink()


def test_faulty_files_are_called_by_their_name_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    name = "train/3.parquet"
    scratch = tmp_path / "scratch"
    for data, parts in (
        (content(name, ["x"], tmp_path, field="body"), ["no column 'text'", "'id', 'body'", "data.text_field"]),
        (hub.files[next(iter(TEXTS))][:-100], ["damaged, incomplete"]),
    ):
        hub.files = {name: data}
        listing = list_hub(options())
        with pytest.raises(DataError) as caught:
            read(listing, scratch)
        assert not isinstance(caught.value, FetchError)
        assert str(scratch) not in str(caught.value)
        for part in (f"{REPO}@{COMMIT}:{name}: ", "data.on_bad_shard=skip", *parts):
            assert part in str(caught.value)


def test_a_reader_that_stops_early_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    listing = list_hub(options())
    documents = listing.reader.documents(listing.shards[1], tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    assert next(iter(documents)) == TEXTS[sorted(TEXTS)[1]][0]
    documents.close()  # type: ignore[attr-defined]
    assert list((tmp_path / "scratch").iterdir()) == []


# --- together with the cache


def test_cache_of_decoded_shards(hub: Hub, tmp_path: Path) -> None:
    listing = list_hub(options())
    cache = ShardCache(tmp_path / "cache", 1e9, listing.reader, "text", skip_bad=False)
    hub.faults.append(hub_server.dropped(700))
    for _ in range(2):
        for shard, texts in zip(listing.shards, TEXTS.values(), strict=True):
            documents = cache.open(shard)
            expected = [text for text in texts if text]
            assert [documents.text(i) for i in range(len(documents))] == expected
    assert len(hub.contents()) == 1 + len(TEXTS)
    assert all(request.method == "GET" for request in hub.requests)
    assert not list((tmp_path / "cache").rglob("file.*")), "the fetched files are gone"


def test_unreachable_is_not_bad(hub: Hub, tmp_path: Path) -> None:
    """on_bad_shard=skip leaves out faulty files, never files that the network did not bring."""
    listing = list_hub(options())
    assert isinstance(listing.reader, HubText)
    impatient = dataclasses.replace(listing.reader, fetch_minutes=0.002)
    cache = ShardCache(tmp_path / "cache", 1e9, impatient, "text", skip_bad=True)
    hub.faults += 100 * [hub_server.status(503)]
    with pytest.raises(FetchError):
        cache.open(listing.shards[0])
    hub.faults.clear()
    assert len(cache.open(listing.shards[0])) == 600


# --- as a user names it


def test_groups() -> None:
    data = load_config(["data=openwebtext"]).data
    assert (data.kind, data.repo, data.split, data.val_fraction) == (
        "openwebtext",
        "Skylion007/openwebtext",
        "train",
        0.005,
    )
    assert re.fullmatch("[0-9a-f]{40}", data.revision or "")
    assert load_config(["data=hf", "data.repo=a/b"]).tokenizer.kind == "llama2"
    with pytest.raises(ConfigError, match=r"data.repo=OWNER/NAME"):
        load_config(["data=hf"])
    with pytest.raises(ConfigError, match=r"(?s)data.files=.*data=hf"):
        load_config(["data=embedded", "data.files=*.parquet"])
