"""Text to shards and back: nothing lost, nothing half-written, every fault found."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data import Dataset, cache_files, open_dataset, prepare_dataset, tokenizers
from ngpt_train.data.cache_files import FileHashes
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.prepared_text import Preparation
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.verbs import prepare as verb
from tests.unit.data.test_tokenizer import tokenizer_json

EOS = 256


def documents(n: int = 60, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    words = [bytes(rng.choices(range(97, 123), k=rng.randrange(2, 9))).decode() for _ in range(300)]
    return [f"{i}: " + " ".join(rng.choices(words, k=rng.randrange(5, 60))) + "\n" for i in range(n)]


def write_corpus(directory: Path, texts: list[str], n_files: int = 3) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for i in range(n_files):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::n_files]]
        (directory / f"part{i}.jsonl").write_text("".join(lines))
    return directory


def config(path: Path, cache: Path, **data: Any) -> Config:
    cfg = Config()
    cfg.data.kind, cfg.data.path, cfg.data.cache, cfg.data.val_fraction = "local", str(path), str(cache), 0.1
    for name, value in data.items():
        setattr(cfg.data, name, value)
    cfg.tokenizer.kind = "bytes"
    cfg.model.context = 32
    return cfg


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config(write_corpus(tmp_path / "text", documents()), tmp_path / "cache")


def snapshot(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*")}


def ids_of(tokens: Tokens) -> np.ndarray:
    ids = np.empty(len(tokens), np.int64)
    tokens.read(0, ids)
    return ids


def split_documents(dataset: Dataset, split: str) -> list[str]:
    """The documents of a split, read as docs/data.md describes the files and in no other way."""
    texts = []
    for shard in dataset.manifest["splits"][split]["shards"]:
        ids = np.fromfile(dataset.path / shard["file"], dataset.manifest["dtype"])
        offsets = np.fromfile(dataset.path / shard["index"], "<u8")
        assert (offsets[0], offsets[-1], len(offsets)) == (0, shard["tokens"], shard["documents"] + 1)
        for start, end in itertools.pairwise(offsets):
            assert ids[end - 1] == dataset.tokenizer.eos
            texts.append(dataset.tokenizer.decode(ids[start : end - 1]))
        assert shard["bytes"] == sum(len(text.encode()) for text in texts[-shard["documents"] :])
    return texts


@pytest.mark.parametrize("shard_tokens", [1, 700])
def test_every_document_once_in_one_split(cfg: Config, shard_tokens: int) -> None:
    texts = documents()
    write_corpus(Path(cfg.data.path or ""), ["", *texts, ""])
    cfg.data.shard_tokens = shard_tokens
    dataset = open_dataset(cfg)
    train, validation = split_documents(dataset, "train"), split_documents(dataset, "validation")
    assert sorted(train + validation) == sorted(texts)
    assert min(len(train), len(validation)) > 0
    assert dataset.manifest["source"]["skipped_empty"] == 2
    shards = dataset.manifest["splits"]["train"]["shards"]
    assert all(shard["tokens"] >= shard_tokens for shard in shards[:-1])

    stream = np.concatenate([np.append(np.frombuffer(text.encode(), np.uint8).astype(int), EOS) for text in train])
    np.testing.assert_array_equal(ids_of(dataset.train), stream)
    assert dataset.train.documents[1].tolist() == [len(text.encode()) + 1 for text in train]


def test_split_depends_on_the_text_alone(cfg: Config, tmp_path: Path) -> None:
    before = set(split_documents(open_dataset(cfg), "validation"))
    more = documents(90)
    other = config(write_corpus(tmp_path / "more", more[::-1], n_files=1), tmp_path / "cache")
    after = set(split_documents(open_dataset(other), "validation"))
    assert before == after & set(documents())


def test_fingerprint_is_the_content_and_the_tokenizer(cfg: Config, tmp_path: Path) -> None:
    reference = open_dataset(cfg).fingerprint
    copy = config(write_corpus(tmp_path / "elsewhere", documents()), tmp_path / "other_cache", shard_tokens=500)
    assert open_dataset(copy).fingerprint == reference
    copy.tokenizer.kind, copy.tokenizer.vocab_size = "sentencepiece", 300
    assert open_dataset(copy).fingerprint != reference
    write_corpus(tmp_path / "text", documents(61))
    assert open_dataset(cfg).fingerprint != reference


def test_tokenizer_is_trained_from_the_training_documents(cfg: Config) -> None:
    cfg.tokenizer.kind, cfg.tokenizer.vocab_size = "sentencepiece", 300
    dataset = open_dataset(cfg)
    expected = load_tokenizer(cfg.tokenizer, split_documents(dataset, "train"))
    assert dataset.tokenizer.fingerprint == expected.fingerprint


def test_cache_is_keyed_by_content(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_dataset(cfg)
    Path(cfg.data.path or "", "part0.jsonl").touch()
    monkeypatch.setattr("ngpt_train.data.prepared_text.build_directory", None)  # nothing is prepared again
    assert open_dataset(cfg).path == first.path
    monkeypatch.undo()
    cfg.data.val_fraction = 0.2
    assert open_dataset(cfg).path != first.path


def test_a_given_tokenizer_finds_what_it_made(cfg: Config, tmp_path: Path) -> None:
    # As `evaluate` does, whose tokenizer comes out of a checkpoint.
    cfg.tokenizer.kind, cfg.tokenizer.vocab_size = "sentencepiece", 300
    trained = open_dataset(cfg)
    before = snapshot(tmp_path / "cache")
    same = open_dataset(cfg, trained.tokenizer)
    assert (same.path, same.fingerprint) == (trained.path, trained.fingerprint)
    assert snapshot(tmp_path / "cache") == before, "prepared once more"

    write_corpus(tmp_path / "other", documents(40)[::-1])
    cfg.data.path = str(tmp_path / "other")
    other = open_dataset(cfg, trained.tokenizer)
    assert other.tokenizer.fingerprint == trained.tokenizer.fingerprint
    assert sorted(split_documents(other, "train") + split_documents(other, "validation")) == sorted(documents(40))
    own = open_dataset(cfg)  # trained from the other text, under another key
    assert own.tokenizer.fingerprint != trained.tokenizer.fingerprint
    assert open_dataset(cfg, trained.tokenizer).path == other.path
    file = tmp_path / "tokenizer.model"
    file.write_bytes(trained.tokenizer.model)
    cfg.tokenizer.path = str(file)
    assert open_dataset(cfg).path == other.path


def test_one_file_with_another_eos_is_another_tokenizer(cfg: Config, tmp_path: Path) -> None:
    """As `evaluate` gives the checkpoint's. Caught: documents of it that end with the eos of who prepared the text."""
    cfg.tokenizer.kind, cfg.tokenizer.path = "hf", str(tmp_path / "tokenizer.json")
    Path(cfg.tokenizer.path).write_bytes(tokenizer_json(("<unk>", "</s>", "<sep>")))
    usual = open_dataset(cfg)
    cfg.tokenizer.eos = "<sep>"
    other = load_tokenizer(cfg.tokenizer)
    given = open_dataset(cfg, other)
    assert given.tokenizer.eos == other.eos != usual.tokenizer.eos
    assert given.path != usual.path
    assert open_dataset(cfg).path == given.path
    cfg.tokenizer.eos = None
    assert open_dataset(cfg).path == open_dataset(cfg, usual.tokenizer).path == usual.path

    sources = "; ".join(f"{name} 1 tokens {path}" for name, path in (("a", usual.path), ("b", given.path)))
    mixed = dataclasses.replace(cfg.data, kind="mixture", path=None, mixture=sources, streaming=True)
    with pytest.raises(DataError, match=r"data\.mixture: b has the tokenizer hf-.* with eos 2, another source .* 1\."):
        open_dataset(dataclasses.replace(cfg, data=mixed))


def test_shards_of_another_tokenizer_say_so(cfg: Config, caplog: pytest.LogCaptureFixture) -> None:
    """Caught: a paper's row on prepared tokens of another tokenizer, without a word."""

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    shards = open_dataset(cfg).path
    cfg.data.kind, cfg.data.path = "tokens", str(shards)
    for kind in ("llama2", "words"):
        cfg.tokenizer.kind = kind
        assert open_dataset(cfg).tokenizer.kind == "bytes"
        assert warnings() == [f"tokenizer.kind={kind} is not used: the shards in {shards} have tokens of bytes"]
        caplog.clear()
    for kind in ("bytes", "sentencepiece"):  # the same, and what nobody chose
        cfg.tokenizer.kind = kind
        open_dataset(cfg)
        assert not warnings()


def test_a_given_tokenizer_needs_no_download(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("downloads")

    monkeypatch.setattr(tokenizers, "gpt2_ranks", refused)
    cfg.tokenizer.kind = "gpt2"
    given = tokenizers.GPT2Tokenizer({bytes([i]): i for i in range(256)})
    assert open_dataset(cfg, given).tokenizer.fingerprint == given.fingerprint


def test_one_process_of_a_cache_hashes_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for the checksum, without a process group. Caught: each of them hashes all files."""
    monkeypatch.setattr(cache_files, "SETTLED", -1.0)
    monkeypatch.setattr(cache_files, "SHARED", 1000)
    files = [tmp_path / f"{i}.bin" for i in range(3)]
    for i, file in enumerate(files):
        np.full(1000, i, "<u2").tofile(file)
    hashed: list[Path] = []
    hash_file = cache_files._hash

    def slow(path: Path, dtype: str | None) -> list[Any]:
        hashed.append(path)
        time.sleep(0.2)
        return hash_file(path, dtype)

    monkeypatch.setattr(cache_files, "_hash", slow)
    with ThreadPoolExecutor(4) as ranks:  # a lock keeps out threads as it does processes
        found = list(ranks.map(lambda _: [FileHashes(tmp_path / "cache").tokens(f, "<u2") for f in files], range(4)))
    assert sorted(hashed) == files
    assert found == [[(hashlib.sha256(file.read_bytes()).hexdigest(), i) for i, file in enumerate(files)]] * 4
    assert not list((tmp_path / "cache").glob(".*"))
    np.full(1000, 9, "<u2").tofile(files[0])
    assert FileHashes(tmp_path / "cache").tokens(files[0], "<u2")[1] == 9


def test_hashes_where_the_cache_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "SHARED", 1)
    (tmp_path / "file").write_bytes(b"aaaa")
    (tmp_path / "cache").write_bytes(b"not a directory")
    known = FileHashes(tmp_path / "cache" / "below")
    assert known.sha256(tmp_path / "file") == hashlib.sha256(b"aaaa").hexdigest()
    known.save()


def test_checksums_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "SETTLED", -1.0)
    file = tmp_path / "file"
    file.write_bytes(b"aaaa")
    known = FileHashes(tmp_path / "cache")
    first = known.sha256(file)
    assert not (tmp_path / "cache").exists()
    known.save()
    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "_hash", None)
        assert FileHashes(tmp_path / "cache").sha256(file) == first
    stat = file.stat()
    while file.stat().st_ctime_ns == stat.st_ctime_ns:  # until the file system's clock ticks
        file.write_bytes(b"aaab")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FileHashes(tmp_path / "cache").sha256(file) != first
    (tmp_path / "cache" / "hashes.json").write_text("{")
    assert FileHashes(tmp_path / "cache").sha256(file) != first


def test_a_file_that_has_just_changed_is_hashed_again(tmp_path: Path) -> None:
    """Within a tick of the file system's clock two versions look alike. Caught: the checksum of the first for both."""
    (tmp_path / "file").write_bytes(b"aaaa")
    known = FileHashes(tmp_path / "cache")
    known.sha256(tmp_path / "file")
    known.save()
    assert not (tmp_path / "cache").exists()


def test_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a name that a power failure leaves without the files; a lock that others wait for after it is gone."""
    target = tmp_path / "target"
    done: list[str] = []
    rename, sync, release = os.rename, cache_files.sync, FileLock.release

    def write(partial: Path) -> None:
        (partial / "file").write_bytes(b"text")

    def renamed(source: Path, to: Path) -> None:
        done.append("rename")
        rename(source, to)

    def synced(path: Path) -> None:
        done.append(path.name if path.name == "file" else "directory")
        sync(path)

    def released(self: FileLock, *args: Any, **keys: Any) -> None:
        assert not (tmp_path / ".target.lock").exists(), "another process may hold a lock of this name by now"
        done.append("release")
        release(self, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", renamed)
        patch.setattr(cache_files, "sync", synced)
        patch.setattr(FileLock, "release", released)
        cache_files.build_directory(target, write)
    assert done[:5] == ["file", "directory", "rename", "directory", "release"]


def test_out_is_written_once_and_never_over(cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg.data.out = str(tmp_path / "deep" / "out")
    assert verb.main(cfg, []) == 0
    report = capsys.readouterr().out
    written = snapshot(tmp_path / "deep")
    assert verb.main(cfg, []) == 0
    assert capsys.readouterr().out == report
    assert "documents          60 (0 empty ones skipped)" in report
    n_bytes = sum(len(text.encode()) for text in documents())
    assert f"bytes per token    {n_bytes / (n_bytes + 60):.3f}" in report
    assert str(tmp_path / "deep" / "out") in report

    cfg.data.val_fraction = 0.2
    with pytest.raises(DataError, match="is not overwritten; choose another"):
        verb.main(cfg, [])
    assert snapshot(tmp_path / "deep") == written
    cfg.data.out = str(tmp_path / "text")
    with pytest.raises(DataError, match="is not overwritten; choose another"):
        verb.main(cfg, [])
    cfg.data.out = str(tmp_path / "text" / "part0.jsonl")
    with pytest.raises(DataError, match=r"part0\.jsonl"):
        verb.main(cfg, [])


def last_line_broken(cfg: Config) -> None:
    with Path(cfg.data.path or "", "part2.jsonl").open("a") as file:
        file.write('{"body": 1}\n')


def setting(**values: Any) -> Callable[[Config], None]:
    def apply(cfg: Config) -> None:
        for name, value in values.items():
            group, key = name.split("__")
            setattr(getattr(cfg, group), key, value)

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda cfg: write_corpus(Path(cfg.data.path), ["again"] * 3), "all 3 documents are the same text"),
        (lambda cfg: write_corpus(Path(cfg.data.path), ["", ""]), r"no text \(2 empty documents\)"),
        (last_line_broken, r"part2\.jsonl, line 21: no field 'text' \(there are: 'body'\)"),
        (setting(data__val_fraction=1e-4), r"none of 60 documents for validation; set data\.val_fraction to at least"),
        (setting(data__val_fraction=0.9999), r"none of 60 documents for training; set data\.val_fraction to at most"),
        (setting(model__context=5000), r"validation split has \d+ tokens.*model\.context \+ 1 = 5001"),
        (setting(tokenizer__kind="sentencepiece"), r"tokenizer\.vocab_size=4096.*largest that works is \d+"),
        (setting(tokenizer__kind="sentencepiece", tokenizer__path="none.model"), r"none\.model: cannot be read"),
        (setting(data__path="nowhere"), r"data\.path=nowhere: no such file"),
        (setting(data__cache="/dev/null/cache"), "cannot be written.*Not a directory.*data.cache"),
    ],
)
def test_faults_leave_the_disk_as_it_was(
    cfg: Config, tmp_path: Path, spoil: Callable[[Config], None], message: str
) -> None:
    spoil(cfg)
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match=message):
        open_dataset(cfg)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_single_text_file(cfg: Config, tmp_path: Path, kind: str) -> None:
    """Its end validates, and not a character is lost."""
    text = "".join(f"line {i} of the only text\n" for i in range(400))
    cfg.data.path = str(tmp_path / "book.txt")
    Path(cfg.data.path).write_text(text)
    cfg.data.val_fraction, cfg.model.context = 0.1, 16
    cfg.tokenizer.kind, cfg.tokenizer.vocab_size = kind, 300
    data = open_dataset(cfg)
    parts = [data.tokenizer.decode(ids_of(split).tolist()) for split in (data.train, data.validation)]
    assert "".join(parts) == text
    assert parts[1].startswith("line ")
    assert len(parts[1]) == pytest.approx(0.1 * len(text), abs=30)


def test_suggested_val_fraction_works(cfg: Config) -> None:
    cfg.data.val_fraction, cfg.model.context = 1e-4, 16
    with pytest.raises(DataError) as caught:
        open_dataset(cfg)
    cfg.data.val_fraction = float(str(caught.value).split("at least ")[1].split(",")[0])
    assert open_dataset(cfg).manifest["splits"]["validation"]["documents"] >= 1


def test_a_file_that_changes_meanwhile(cfg: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenize = Preparation._tokenize

    def tokenize_then_change(*args: Any) -> None:
        tokenize(*args)
        last_line_broken(cfg)

    monkeypatch.setattr(Preparation, "_tokenize", tokenize_then_change)
    with pytest.raises(DataError, match="changed while it was read"):
        open_dataset(cfg)
    assert not (tmp_path / "cache").exists()


def test_two_at_once_prepare_once(
    cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokenize = Preparation._tokenize

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        tokenize(*args)

    monkeypatch.setattr(Preparation, "_tokenize", slow)
    with ThreadPoolExecutor(2) as processes:  # a lock keeps out threads as it does processes
        found = list(processes.map(lambda _: open_dataset(cfg).fingerprint, range(2)))
    assert len(set(found)) == 1
    assert caplog.text.count("preparing data=local") == 1
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of prepared shards, with a tokenizer of 300 pieces."""
    directory = tmp_path_factory.mktemp("prepared")
    cfg = config(write_corpus(directory / "text", documents()), directory / "cache")
    cfg.tokenizer.kind, cfg.tokenizer.vocab_size = "sentencepiece", 300
    return prepare_dataset(cfg, directory / "out").path


def forged(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def forge(directory: Path) -> None:
        path = directory / "manifest.json"
        manifest = json.loads(path.read_text())
        edit(manifest)
        path.write_text(json.dumps(manifest))

    return forge


def shard_says(**values: Any) -> Callable[[Path], None]:
    return forged(lambda manifest: manifest["splits"]["train"]["shards"][0].update(values))


def flip(directory: Path, name: str) -> None:
    data = bytearray((directory / name).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / name).write_bytes(data)


def cut_file(directory: Path, name: str) -> None:
    (directory / name).write_bytes((directory / name).read_bytes()[:-2])


def number(name: str, dtype: str, place: int, value: int) -> Callable[[Path], None]:
    """A wrong number in a file of the training split, whose checksum in the manifest is right."""

    def forge(directory: Path) -> None:
        numbers = np.fromfile(directory / name, dtype)
        numbers[place] = value
        numbers.tofile(directory / name)
        sha256 = FileHashes(directory).sha256(directory / name)
        shard_says(**{"index_sha256" if name.endswith(".idx") else "sha256": sha256})(directory)

    return forge


def an_empty_document(directory: Path) -> None:
    """The third document begins where the fourth does."""
    offsets = np.fromfile(directory / "train-00000.idx", "<u8")
    number("train-00000.idx", "<u8", 3, int(offsets[2]))(directory)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: flip(d, "train-00000.bin"), r"train-00000\.bin: sha256 .* but the manifest says"),
        (lambda d: flip(d, "val-00000.idx"), r"val-00000\.idx: sha256"),
        (lambda d: cut_file(d, "train-00000.bin"), r"train-00000\.bin: \d+ bytes, but the manifest says \d+"),
        (lambda d: (d / "val-00000.bin").unlink(), r"val-00000\.bin: cannot be read"),
        (lambda d: (d / "train-00000.idx").unlink(), r"train-00000\.idx: cannot be read"),
        (number("train-00000.bin", "<u2", 3, 300), r"train-00000\.bin: holds id 300, .* ids below 300"),
        # Documents beyond the ids, for which memory would be taken, or documents that never end.
        (number("train-00000.idx", "<u8", -1, 10**12), r"train-00000\.idx: its documents do not fit"),
        (number("train-00000.idx", "<u8", 0, 5), r"train-00000\.idx: its documents do not fit"),
        (number("train-00000.idx", "<u8", 3, 1), r"train-00000\.idx: its documents do not follow"),
        (an_empty_document, r"train-00000\.idx: its documents do not follow"),
        (lambda d: (d / "tokenizer.model").write_bytes(b"x"), r"tokenizer\.model: not the tokenizer that made"),
        (lambda d: (d / "manifest.json").unlink(), r"with manifest\.json.*missing: train\.bin, val\.bin"),
        (lambda d: cut_file(d, "manifest.json"), r"manifest\.json: damaged"),
        (forged(lambda m: m.update(version=2)), "format version 2, this program reads 1"),
        (forged(lambda m: m["splits"]["train"].update(sha256="0")), "damaged.*fingerprint"),
        (forged(lambda m: m.pop("dtype")), "dtype=null is not"),
        (forged(lambda m: m.update(dtype="O")), "dtype is 'O'"),
        (forged(lambda m: m["tokenizer"].update(eos="1")), 'eos="1" is not'),
        (forged(lambda m: m["tokenizer"].update(eos=-1)), "eos=-1"),
        (forged(lambda m: m["tokenizer"].update(eos=300)), "eos=300"),
        (shard_says(file="../val-00000.bin"), r"called '\.\./val-00000\.bin'"),
        (shard_says(index="/dev/zero"), "called '/dev/zero'"),
        (shard_says(documents=10**12), "1000000000000 documents"),
        (forged(lambda m: m["splits"]["train"].update(shards=[])), "there are no shards"),
        (forged(lambda m: m["splits"]["train"].update(tokens=10**15)), "not the sum of its shards"),
    ],
)
def test_damaged_or_forged_shards_are_refused(
    made: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    """Caught: a file outside of the directory that is opened; memory for a number that somebody has made up."""
    directory = tmp_path / "out"
    shutil.copytree(made, directory)
    spoil(directory)
    with pytest.raises(DataError, match=message):
        open_dataset(config(directory, tmp_path / "cache", kind="tokens", pack="best_fit"))


def test_prepared_shards_are_opened(made: Path, tmp_path: Path) -> None:
    opened = open_dataset(config(made, tmp_path / "cache", kind="tokens", pack="best_fit"))
    assert opened.fingerprint == json.loads((made / "manifest.json").read_text())["fingerprint"]


def test_nanogpt_files(cfg: Config, tmp_path: Path) -> None:
    prepared = open_dataset(cfg)
    directory = tmp_path / "nanogpt"
    directory.mkdir()
    cfg.data.kind, cfg.data.path = "tokens", str(directory)
    with pytest.raises(DataError, match=r"missing: train\.bin, val\.bin"):
        open_dataset(cfg)
    for split, stem in (("train", "train"), ("validation", "val")):
        tokens = getattr(prepared, split)
        ids_of(tokens).astype(np.uint16).tofile(directory / f"{stem}.bin")
    dataset = open_dataset(cfg)
    # The same ids with the same tokenizer are the same data, whatever file they are in.
    assert dataset.fingerprint == prepared.fingerprint
    np.testing.assert_array_equal(ids_of(dataset.train), ids_of(prepared.train))
    cfg.tokenizer.kind = "gpt2"
    assert open_dataset(cfg).fingerprint != prepared.fingerprint

    cfg.tokenizer.kind = "sentencepiece"
    with pytest.raises(DataError, match=r"tokenizer\.path=null.*choose the tokenizer that made these tokens"):
        open_dataset(cfg)
    cfg.tokenizer.kind = "bytes"
    with (directory / "val.bin").open("ab") as file:
        file.write(np.array([50256], "<u2").tobytes())
    with pytest.raises(DataError, match=r"val\.bin: holds id 50256, but tokenizer bytes has ids below 257"):
        open_dataset(cfg)
    cut_file(directory, "val.bin")
    with (directory / "val.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match=r"val\.bin: \d+ bytes, which is no number of uint16 ids"):
        open_dataset(cfg)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    from ngpt_train.data.shard_writer import SplitWriter, dtype_for

    assert dtype_for(65_536) == "<u2"
    writer = SplitWriter(tmp_path, "train", dtype_for(65_537), shard_tokens=10)
    writer.add([(np.array([65_536, 1]), 3)])
    assert writer.finish()["tokens"] == 2
    assert (tmp_path / "train-00000.bin").read_bytes() == b"\x00\x00\x01\x00\x01\x00\x00\x00"


def test_sample_is_bounded_and_repeatable() -> None:
    from ngpt_train.data.sources.source import SAMPLE_PIECE, Sample

    def draw(limit: int) -> list[str]:
        sample = Sample(limit)
        for i in range(200):
            sample.add(f"{i} " * 20_000, i / 200)
        return sample.texts()

    few, all_of_it = draw(1_000_000), draw(10**9)
    assert few == draw(1_000_000)
    assert 400_000 < sum(map(len, few)) <= 1_000_000
    assert max(map(len, few)) <= SAMPLE_PIECE
    assert len({text.split()[1] for text in few}) > 30  # from everywhere, not from the start
    assert "".join(all_of_it) == "".join(f"{i} " * 20_000 for i in range(200))


def corpus_of_six(directory: Path) -> Path:
    """Six files that differ in their words and the lengths of their documents."""
    directory.mkdir()
    for i in range(6):
        texts = [" ".join(f"{'abcdef'[i]}{j * k % 97}" for k in range(40 * (1 + 20 * (j == 7)))) for j in range(40)]
        (directory / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return directory


@pytest.mark.parametrize("characters", [10**9, 30_000])
def test_streamed_and_prepared_text_train_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    """From all text, and from a sample of several files. Caught: two samplers."""
    from ngpt_train.data.sources import source

    monkeypatch.setattr(source, "SAMPLE_CHARACTERS", characters)
    monkeypatch.setattr(source, "SAMPLE_PIECE", 1000)
    cfg = config(corpus_of_six(tmp_path / "text"), tmp_path / "cache")
    cfg.tokenizer.kind, cfg.tokenizer.vocab_size = "sentencepiece", 330
    prepared = open_dataset(cfg).tokenizer
    cfg.data.streaming, cfg.eval.rows = True, 1
    assert open_dataset(cfg).tokenizer.fingerprint == prepared.fingerprint


def test_a_sample_is_of_several_shards_and_no_more_than_it_needs() -> None:
    """The same wherever the shards stand. Caught: all text is read for a tokenizer; the first file speaks for all."""
    from ngpt_train.data.sources.source import SAMPLE_CHARACTERS, SAMPLE_SHARDS, Shard, draw_sample

    shards = [Shard(f"{i}", f"content {i}", ()) for i in range(9)]
    read: list[int] = []

    def documents(number: int) -> list[str]:
        read.append(number)
        return [f"{shards[number].identity} {i} ".ljust(SAMPLE_CHARACTERS // 2 - 1, "x") for i in range(2)]

    texts, counts = draw_sample(shards, documents, 0.0)
    assert len(read) == SAMPLE_SHARDS
    assert counts is None
    contents = {shards[number].identity for number in read}
    assert {text[:9] for text in texts if text.startswith("content")} <= contents
    shards.reverse()
    read.clear()
    draw_sample(shards, documents, 0.0)
    assert {shards[number].identity for number in read} == contents
    texts, counts = draw_sample(shards, lambda number: [f"{number} a", "", f"{number} b"], 0.0)
    assert texts == [f"{number} {letter}" for number in range(9) for letter in "ab"]  # in the order of the text
    assert counts is not None
    assert (counts.documents, counts.empty) == (18, 9)
