"""`prepare` in several processes, killed and started again: the same bytes, and nothing done twice."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.progress import Progress
from ngpt_train.data import prepare_dataset
from ngpt_train.data.cache_files import FileHashes
from ngpt_train.data.sources import local_files, open_source
from ngpt_train.data.sources.hub import DatasetsText
from ngpt_train.data.sources.hub_client import HubFile
from ngpt_train.data.sources.local_files import LocalText
from ngpt_train.data.sources.source import Shard, Source
from tests.unit.data.test_data_prepare import config as local_config
from tests.unit.data.test_data_prepare import documents as made_documents

UNIT = 8192


def documents(n: int, seed: int = 1) -> list[str]:
    return [text if i % 17 else "" for i, text in enumerate(made_documents(n, seed))]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text")


def write_corpus(directory: Path) -> Path:
    """Large files, which are cut, and small files, which are not, of both kinds."""
    directory.mkdir()
    lines = [json.dumps({"text": text}) for text in documents(400)]
    lines[50:50] = ["", "  "]
    (directory / "a.jsonl").write_text("\ufeff" + "\n".join(lines))  # no end of the last line
    pq.write_table(pa.table({"text": documents(300, 2)}), directory / "b.parquet", row_group_size=20)
    for i in range(3):
        (directory / f"c{i}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in documents(15, 3 + i)))
    return directory


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "UNIT_BYTES", UNIT)


def config(corpus: Path, **data: Any) -> Config:
    return local_config(corpus, corpus.parent / "cache", shard_tokens=8000, prepare_workers=1, **data)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_any_number_of_processes_writes_the_same(corpus: Path, tmp_path: Path) -> None:
    """With a tokenizer that is trained. Caught: chunks of a process out of turn; a sample that knows the processes."""
    cfg = config(corpus)
    cfg.tokenizer.kind, cfg.tokenizer.vocab_size = "sentencepiece", 320
    assert len(local_files.units_of(open_source(cfg.data), FileHashes(tmp_path))) > 10
    written = []
    for n in (1, 2):
        cfg.data.prepare_workers = n
        written.append(content(prepare_dataset(cfg, tmp_path / f"out{n}").path))
    assert written[0] == written[1]
    source = json.loads(written[0]["manifest.json"])["source"]
    texts = documents(400) + documents(300, 2) + [text for i in range(3) for text in documents(15, 3 + i)]
    assert (source["documents"], source["skipped_empty"]) == (len([t for t in texts if t]), texts.count(""))
    assert source["bytes"] == sum(len(text) for text in texts)
    assert not list(tmp_path.glob(".*"))


def test_parts_of_files_hold_every_document_once(corpus: Path) -> None:
    for size in (100, 1000, 4096):
        local_files.UNIT_BYTES = size
        for name, texts in (("a.jsonl", documents(400)), ("b.parquet", documents(300, 2))):
            source = open_source(config(corpus / name).data)
            parts = local_files.units_of(source, FileHashes(corpus.parent))
            assert len({unit.identity for unit in parts}) == len(parts) > 5
            assert [text for unit in parts for text in source.reader.documents(unit, Path())] == texts


KILLED = """
import json, logging, multiprocessing, os, signal, sys
from pathlib import Path
from ngpt_train.config.schema import Config
from ngpt_train.data import prepare_dataset
from ngpt_train.data import shard_writer
from ngpt_train.data.sources import local_files
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus, out, workers, records, local_files.UNIT_BYTES = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    cfg = Config()
    cfg.data.kind, cfg.data.path, cfg.data.cache, cfg.data.val_fraction = "local", corpus, out + "_cache", 0.1
    cfg.data.shard_tokens, cfg.data.prepare_workers = 8000, workers
    cfg.tokenizer.kind, cfg.model.context = "bytes", 32
    record = shard_writer.ShardWriter.record
    def record_and_die(self):
        global records
        record(self)
        records -= 1
        if records == 0:
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    shard_writer.ShardWriter.record = record_and_die
    prepare_dataset(cfg, Path(out))
"""


def prepare_killed(corpus: Path, out: Path, workers: int, records: int) -> tuple[int, str]:
    """Prepares in a process that is killed after `records` records. Returns its exit code and log."""
    script = out.parent / "killed.py"
    script.write_text(KILLED)
    arguments = [sys.executable, script, corpus, out, str(workers), str(records), str(UNIT)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    deadline = time.monotonic() + 20
    while any(map(is_running, map(int, process.stdout.split()))):
        assert time.monotonic() < deadline, "processes of a killed prepare go on"
        time.sleep(0.05)
    return process.returncode, process.stderr


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def after_a_kill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text, and beside it the files of two processes that were killed after six records of finished shards."""
    directory = tmp_path_factory.mktemp("killed")
    write_corpus(directory / "text")
    # Too little for a shard: the journal has no entry of it.
    (directory / "text/0.jsonl").write_text('{"text": "one"}\n')
    assert prepare_killed(directory / "text", directory / "out", workers=2, records=6)[0] == -signal.SIGKILL
    assert not (directory / "out").exists()
    return directory


@pytest.fixture
def left(after_a_kill: Path, tmp_path: Path) -> Path:
    """A copy of it: the directory of the text."""
    shutil.copytree(after_a_kill, tmp_path, dirs_exist_ok=True)
    return tmp_path / "text"


def another_text(name: str) -> Callable[[Config], object]:
    return lambda cfg: Path(cfg.data.path or "", name).write_text('{"text": "another"}\n')


def cut_line(cfg: Config) -> None:
    """The kill came within the last line of the journal: shards have more than the line before says."""
    journal = Path(cfg.data.path or "").parent / ".out.partial" / "journal.jsonl"
    journal.write_text(journal.read_text()[:-20])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "used"),
    [
        (lambda cfg: None, True),
        (cut_line, True),
        (another_text("c2.jsonl"), True),  # after the finished shards
        (another_text("a.jsonl"), False),
        (another_text("0.jsonl"), False),  # too little for an entry of the journal
        (lambda cfg: setattr(cfg.data, "shard_tokens", 4000), False),
        (lambda cfg: setattr(cfg.data, "val_fraction", 0.2), False),
        (lambda cfg: vars(cfg.tokenizer).update(kind="sentencepiece", vocab_size=320), False),
    ],
)
def test_what_a_kill_left_is_used_where_it_fits(
    left: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Config], object], used: bool
) -> None:
    """Caught: shards of other text, of another split, size or tokenizer that are taken over; a kill that costs all
    finished work; half a line of the journal that is believed."""
    caplog.set_level(logging.INFO)
    cfg = config(left)
    change(cfg)
    written = content(prepare_dataset(cfg, tmp_path / "out").path)
    assert ("going on after" in caplog.text) == used
    assert written == content(prepare_dataset(cfg, tmp_path / "fresh").path)


def test_killed_again(left: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With another number of processes. Caught: a second start that begins anew, or goes on where the first began."""
    caplog.set_level(logging.INFO)
    code, log = prepare_killed(left, tmp_path / "out", workers=1, records=5)
    assert code == -signal.SIGKILL, log
    assert not (tmp_path / "out").exists()
    written = content(prepare_dataset(config(left), tmp_path / "out").path)
    before, after = (int(text.split("going on after ")[1].split(" ")[0]) for text in (log, caplog.text))
    assert 0 < before < after
    assert written == content(prepare_dataset(config(left), tmp_path / "fresh").path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_damage_to_what_a_kill_left(left: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Caught: shards with a wrong byte that are taken over; shards that are lost to a command which reads nothing."""
    partial = tmp_path / ".out.partial"
    before = content(partial)
    cfg = config(left)
    cfg.tokenizer.kind, cfg.tokenizer.path = "sentencepiece", str(left / "a.jsonl")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        prepare_dataset(cfg, tmp_path / "out")
    assert content(partial) == before
    shard = partial / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\7")
    fresh = content(prepare_dataset(config(left), tmp_path / "fresh").path)
    assert content(prepare_dataset(config(left), tmp_path / "out").path) == fresh
    assert "beginning anew" in caplog.text


def test_a_fault_names_its_line_and_costs_nothing(corpus: Path, tmp_path: Path) -> None:
    """In one of two processes. Caught: the line within the part of the file; shards of before that go on in the text
    that was mended."""
    cfg = config(corpus)
    lines = (corpus / "a.jsonl").read_text().splitlines()
    (corpus / "a.jsonl").write_text("\n".join([*lines[:350], '{"body": 1}', *lines[350:]]))
    for cfg.data.prepare_workers in (2, 1):
        with pytest.raises(DataError, match=r"a\.jsonl, line 351: no field 'text'"):
            prepare_dataset(cfg, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    # What is cut from it has changed, and is read anew.
    (corpus / "a.jsonl").write_text("\n".join(lines))
    assert content(prepare_dataset(cfg, tmp_path / "out").path) == content(
        prepare_dataset(cfg, tmp_path / "fresh").path
    )


class Deadly(LocalText):
    """Ends its process where the text says so, as a lack of memory does."""

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        for text in super().documents(shard, scratch):
            if text.startswith("300: "):
                os.kill(os.getpid(), signal.SIGKILL)
            yield text


def test_a_process_that_is_killed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(corpus)
    cfg.data.prepare_workers = 2
    source = open_source(cfg.data)
    deadly = dataclasses.replace(source, reader=Deadly(source.reader.read))  # type: ignore[attr-defined]
    monkeypatch.setattr("ngpt_train.data.prepared_text.open_source", lambda _: deadly)
    with pytest.raises(DataError, match=r"ended without a word \(exit code -9.*Run the same command again"):
        prepare_dataset(cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_formats_of_the_datasets_library(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository without parquet and jsonl files; one with them is read shard by shard."""
    pa_csv = pytest.importorskip("pyarrow.csv")
    texts = [text for text in documents(200) if text]
    (tmp_path / "owner/csv").mkdir(parents=True)
    pa_csv.write_csv(pa.table({"text": texts, "n": range(len(texts))}), tmp_path / "owner/csv/train.csv")
    cfg = config(corpus)
    monkeypatch.chdir(tmp_path)  # where the library finds owner/csv
    cfg.data.kind, cfg.data.path, cfg.data.repo = "hf", None, "owner/csv"
    listed = {"README.md": HubFile(9, "1"), "train.csv": HubFile(9, "2")}
    monkeypatch.setattr("ngpt_train.data.sources.hub._files", lambda *_: (None, listed))
    out = prepare_dataset(cfg, tmp_path / "out")
    assert out.manifest["source"]["documents"] == len(texts)
    assert out.manifest["source"]["bytes"] == sum(map(len, texts))
    for field, split, message in (
        ("body", "train", "no column 'body' .*'text', 'n'"),
        ("n", "train", "row 1: 'n' holds"),
    ):
        cfg.data.text_field, cfg.data.split = field, split
        with pytest.raises(DataError, match=message):
            prepare_dataset(cfg, tmp_path / "none")
    cfg.data.text_field, cfg.data.split = "text", "test"
    with pytest.raises(DataError, match="datasets library cannot read it"):
        prepare_dataset(cfg, tmp_path / "none")

    cfg.data.split = "train"
    files = tuple(Shard(path.name, f"etag {path.name}", (str(path),)) for path in sorted(corpus.glob("c*.jsonl")))
    reader = open_source(config(corpus).data).reader
    listing = Source("hf", reader, {}, shards=files, revision="79d93d78")
    monkeypatch.setattr("ngpt_train.data.sources.list_hub", lambda data: listing)
    shards = prepare_dataset(cfg, tmp_path / "shards")
    assert shards.manifest["source"]["revision"] == "79d93d78"
    assert shards.manifest["source"]["files"] == ["c0.jsonl", "c1.jsonl", "c2.jsonl"]
    assert shards.manifest["source"]["documents"] == 3 * 14


def test_the_datasets_library_goes_on_in_order(tmp_path: Path) -> None:
    import datasets

    texts = documents(50)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "arrow").mkdir()
    arrow.rename(tmp_path / "arrow" / "train.arrow")
    source = DatasetsText(str(tmp_path / "arrow"), None, "train", "text")
    assert list(source.documents(source.shard, tmp_path)) == texts


def test_progress(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a division by no text, where the first documents are empty."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("ngpt_train.core.progress.LINE_SECONDS", 0.0)
    with Progress("preparing", [1, 1]) as unknown:
        unknown.heard(0, 1, 4)
        assert unknown.fraction() is None
    with Progress("preparing", [10_000_000]) as empty:
        empty.heard(0, 1, 0)
    assert caplog.text.rstrip().endswith("preparing: 0 %, 1 documents, 0.0 MB, 0.0 MB/s")
    with Progress("preparing", [10_000_000, 20_000_000, 30_000_000, 40_000_000], done=1) as progress:
        progress.heard(1, 3, 4_000_000)
        assert progress.fraction() == pytest.approx(4 / 90)
        progress.heard(2, 1, 1_000_000)
        progress.at(2)
        progress.heard(2, 1, 4_000_000)
        assert progress.fraction() == pytest.approx(0.5)  # 9 of 18 MB
    assert "preparing: 55 %, 5 documents, 9.0 MB, " in caplog.text
    assert caplog.text.rstrip().endswith("left")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """A text ten times as long takes no more memory, in any process, also where a process reads half of it as one
    unit. Caught: a process that holds the tokens of its unit."""
    peaks = []
    for n in (1, 10):
        path = tmp_path / f"{n}"
        path.mkdir()
        for half in range(2):
            with (path / f"{half}.jsonl").open("w") as file:
                for i in range(half, n * 1500, 2):
                    file.write(json.dumps({"text": f"{i} " + "some words of a text " * 100}) + "\n")
        code = (
            "import resource, sys; from pathlib import Path; from ngpt_train.config.schema import Config\n"
            "from ngpt_train.data import prepare_dataset; from ngpt_train.data.sources import local_files\n"
            "local_files.UNIT_BYTES = 1_500_000\n"
            "local_files._parts = lambda file: []\n"
            "cfg = Config(); cfg.data.kind, cfg.data.path, cfg.data.cache, out = 'local', *sys.argv[1:]\n"
            "cfg.tokenizer.kind, cfg.data.prepare_workers, cfg.model.context = 'bytes', 2, 32\n"
            "prepare_dataset(cfg, Path(out))\n"
            # Not getrusage(RUSAGE_SELF), which counts the process before exec, a copy of the tests' process.
            "own = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
            "print(max(int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024)"
        )
        arguments = [sys.executable, "-c", code, path, tmp_path / "cache", tmp_path / f"out{n}"]
        peaks.append(float(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout))
    assert np.diff(peaks) < 40
