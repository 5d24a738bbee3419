"""What a run refuses, before its first step and with nothing changed on disk."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata

from ngpt_train.__main__ import main
from ngpt_train.config.schema import TokenizerConfig
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.data.tokenizers.sentence_piece import train_sentencepiece
from ngpt_train.training.checkpoint import list_checkpoints
from tests.processes.runs import arguments, contents, records, starts, write_corpus


def refused(
    directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str], code: int, *overrides: str, verb: str = "train"
) -> str:
    """The message of a command that must fail with `code` and leave the runs as they are."""
    before = contents(directory / "runs")
    capsys.readouterr()
    assert main([verb, *arguments(directory, corpus, "train.steps=4", "checkpoint.every=2", *overrides)]) == code
    assert contents(directory / "runs") == before
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=1", ["run.seed", "0 -> 1"]),
        ("model.vocab_size=300", ["model.vocab_size", "257 -> 300"]),
    ],
)
def test_resume_that_changes_the_run(
    directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str], override: str, words: list[str]
) -> None:
    message = refused(directory, corpus, capsys, 2, override)
    assert all(word in message for word in [*words, "run.name", "run.overwrite"])


def test_resume_on_other_text(directory: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other.jsonl", seed=1)
    assert "fingerprint" in refused(directory, other, capsys, 3, "train.steps=6")


def test_resume_with_another_tokenizer(corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same kind from another file; both are named."""
    model = tmp_path / "tokenizer.model"
    given = ["tokenizer=sentencepiece", f"tokenizer.path={model}"]
    names = []
    for pieces in (300, 310):
        texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        model.write_bytes(train_sentencepiece(texts, pieces))
        names.append(load_tokenizer(TokenizerConfig(path=str(model))).name)
        if pieces == 300:
            assert main(["train", *arguments(tmp_path, corpus, *given, "train.steps=1")]) == 0
    message = refused(tmp_path, corpus, capsys, 3, *given, "train.steps=1", "model.vocab_size=auto")
    assert f"the tokenizer is {names[1]}" in message
    assert f"trained with {names[0]}" in message


def test_directory_in_use(directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (directory / "runs/test/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "a running process is training" in refused(directory, corpus, capsys, 2)


def test_directory_of_something_else(directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "runs/mine").mkdir()
    (directory / "runs/mine/thesis.tex").write_text("years of work")
    for overwrite in ("false", "true"):
        message = refused(directory, corpus, capsys, 2, "run.name=mine", f"run.overwrite={overwrite}")
        assert "not the directory of a run" in message


def test_foreign_config_is_no_run(directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "runs/mine").mkdir()
    (directory / "runs/mine/config.yaml").write_text("lr: 3")
    assert "not the directory of a run" in refused(directory, corpus, capsys, 2, "run.name=mine", "run.overwrite=true")
    (directory / "runs/mine/run.json").write_text("{}")
    refused(directory, corpus, capsys, 3, "run.name=mine", "run.overwrite=true")


def test_overwrite_leaves_what_is_not_ours(directory: Path, corpus: Path, tmp_path: Path) -> None:
    big_disk = tmp_path / "disk"
    (directory / "runs/test/checkpoints").rename(big_disk)
    (directory / "runs/test/checkpoints").symlink_to(big_disk)
    (directory / "runs/test/notes.txt").write_text("mine")
    given = arguments(directory, corpus, "train.steps=1", "run.overwrite=true", "checkpoint.every=0")
    assert main(["train", *given]) == 0
    assert (directory / "runs/test/notes.txt").read_text() == "mine"
    assert len(list_checkpoints(big_disk)) == 2


def test_cut_metadata(directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "runs/test/run.json").write_text('{"sta')
    assert "missing or damaged" in refused(directory, corpus, capsys, 3, "train.steps=6")


def test_source_of_the_weights_may_go(directory: Path, corpus: Path) -> None:
    source = f"run.init_from={directory / 'runs/test'}"
    given = arguments(directory, corpus, "run.name=second", source, "train.steps=2", "train.stop_at=1")
    assert main(["train", *given]) == 0
    shutil.rmtree(directory / "runs/test")
    for left in ([source], []):
        rest = arguments(directory, corpus, "run.name=second", "train.steps=2", *left)
        assert main(["train", *rest]) == 0
    assert sorted(records(directory / "runs/second")) == [1, 2]


def test_start_that_was_killed_at_once(directory: Path, corpus: Path) -> None:
    (directory / "runs/new").mkdir()
    for name in ("lock", "run.json"):
        (directory / "runs/new" / name).touch()
    assert main(["train", *arguments(directory, corpus, "train.steps=1", "run.name=new")]) == 0


def test_resume_never_and_must(directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "run.overwrite=true" in refused(directory, corpus, capsys, 2, "run.resume=never")
    assert "no checkpoint" in refused(directory, corpus, capsys, 3, "run.resume=must", "run.name=new")


def test_weights_of_another_version(
    directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: a traceback from deep inside where a checkpoint calls its weights otherwise."""
    read_metadata = HuggingFaceStorageReader.read_metadata

    def without_wk(reader: HuggingFaceStorageReader) -> Metadata:
        found = read_metadata(reader)
        del found.state_dict_metadata["layers.1.wk"]
        return found

    monkeypatch.setattr(HuggingFaceStorageReader, "read_metadata", without_wk)
    message = refused(directory, corpus, capsys, 3, "train.steps=6")
    assert "has no layers.1.wk: another version of ngpt-train wrote it" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [("model=gpt", ["model.name: ngpt in the checkpoint, gpt here"]), ("model.d_model=96", ["model.d_model: 64"])],
)
def test_weights_of_another_model(
    directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str], override: str, words: list[str]
) -> None:
    source = f"run.init_from={directory / 'runs/test'}"
    message = refused(directory, corpus, capsys, 3, "run.name=second", source, override)
    assert all(word in message for word in words)
    assert not (directory / "runs/second").exists()


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_no_checkpoint(directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert f"{verb}.checkpoint" in refused(directory, corpus, capsys, 2, verb=verb)
    assert "does not exist" in refused(directory, corpus, capsys, 3, f"{verb}.checkpoint=nowhere", verb=verb)


def test_vocabulary_smaller_than_the_tokenizer(
    directory: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(directory, corpus, capsys, 3, "run.name=second", "model.vocab_size=100")
    assert "model.vocab_size=100" in message
    assert "257" in message


def test_overwrite_starts_anew(directory: Path, corpus: Path) -> None:
    assert main(["train", *arguments(directory, corpus, "run.seed=1", "train.steps=3", "run.overwrite=true")]) == 0
    assert sorted(records(directory / "runs/test")) == [1, 2, 3]
    assert len(starts(directory / "runs/test")) == 1


@pytest.mark.parametrize(("name", "says"), [("file", "is a file"), ("file/below", "is a file")])
def test_a_file_in_the_place_of_the_run(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/file").write_text("mine")
    assert main(["train", *arguments(tmp_path, corpus, f"run.name={name}")]) == 2
    message = capsys.readouterr().err
    assert f"run.name={name}" in message
    assert says in message
    assert (tmp_path / "runs/file").read_text() == "mine"
    assert not (tmp_path / "cache").exists()
