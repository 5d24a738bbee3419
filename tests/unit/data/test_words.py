"""Word-level text as the papers on Penn Treebank and WikiText-103 count it, and T5's ids."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ngpt_train.config import ConfigError, load_config
from ngpt_train.config.schema import Config, TokenizerConfig
from ngpt_train.core.errors import DataError
from ngpt_train.data import open_dataset
from ngpt_train.data.tokenizers import (
    WordsTokenizer,
    known_vocabulary,
    load_tokenizer,
    model_files,
    read_tokenizer,
    write_tokenizer,
)
from ngpt_train.data.tokenizers.tokenizer import encode_document
from ngpt_train.verbs import plan
from tests.hub_server import COMMIT, Hub, serving
from tests.unit.data.test_data_prepare import ids_of
from tests.unit.data.test_hub import known_to
from tests.unit.data.test_tokenizer import foreign_model

LINES = [" = Title = \n", " \n", " the cat saw the <unk> \n", " \n", " the dog saw <eos> it \n", " a cat \n"]
HELD_OUT = [" the bird saw it \n", " \n", " a cat \n"]


def papers_ids(lines: list[str], words: list[str]) -> list[int]:
    """As Dai et al. (2019) encode lines: the words between white space, then <eos>, of empty lines as well."""
    place = {word: i for i, word in enumerate(words)}
    return [place.get(word, place["<unk>"]) for line in lines for word in [*line.split(), "<eos>"]]


def vocabulary(model: bytes) -> list[str]:
    return model.decode().split()


def config(tmp_path: Path, **data: Any) -> Config:
    cfg = Config()
    cfg.data.kind, cfg.data.cache, cfg.model.context, cfg.tokenizer.kind = "local", str(tmp_path / "cache"), 4, "words"
    for name, value in ({"prepare_workers": 1} | data).items():
        setattr(cfg.data, name, value)
    return cfg


def written(path: Path, lines: list[str]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": [line.strip() and line for line in lines]}), path)
    else:
        path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize("suffix", [".txt", ".parquet"])
def test_a_text_is_the_papers_sequence_of_ids(tmp_path: Path, suffix: str) -> None:
    """A file of one document, and rows of a line each: the same ids, empty lines and their <eos> included.

    Caught: empty lines skipped, words of the validation text in the vocabulary, a share of the text held out.
    """
    train, validation = (written(tmp_path / f"{name}{suffix}", x) for name, x in [("t", LINES * 9), ("v", HELD_OUT)])
    data = open_dataset(config(tmp_path, path=train, val_files=validation, keep_empty=True))
    words = vocabulary(data.tokenizer.model)
    assert set(words) == {"<eos>", "<unk>", *" ".join(LINES).replace("<eos>", "").split()}
    assert words[:4] == ["<eos>", "<unk>", "the", "="]  # then by frequency, and among equals by the alphabet
    text = "".join(LINES).replace("<eos>", "out-of-vocabulary")  # text that spells a special word is text
    assert ids_of(data.train).tolist() == papers_ids(text.splitlines() * 9, words)
    assert ids_of(data.validation).tolist() == papers_ids(HELD_OUT, words)
    assert (data.tokenizer.eos, data.tokenizer.vocab_size) == (0, len(words))


def test_the_vocabulary_counts_what_trains() -> None:
    """`vocab_size` bounds it; the order of the documents does not matter; special words are there once."""
    documents = ["b a a <unk> <eos>", "c c a b", "d"]
    for corpus in (documents, documents[::-1]):
        assert vocabulary(load_words(corpus).model) == ["<eos>", "<unk>", "a", "b", "c", "d"]
        assert vocabulary(load_words(corpus, 5).model) == ["<eos>", "<unk>", "a", "b", "c"]


def load_words(corpus: list[str], vocab_size: int = 300) -> WordsTokenizer:
    tokenizer = load_tokenizer(TokenizerConfig(kind="words", vocab_size=vocab_size), corpus)
    assert isinstance(tokenizer, WordsTokenizer)
    return tokenizer


def test_words_of_a_part_alone_make_the_vocabulary(tmp_path: Path) -> None:
    """The held-out documents, or the held-out end of the only document, are not counted."""
    one = written(tmp_path / "one.txt", [f"w{i}\n" for i in range(100)])
    data = open_dataset(config(tmp_path, path=one, val_fraction=0.2))
    assert data.tokenizer.vocab_size < 100 - 15
    assert not {"w99", "w90"} & set(vocabulary(data.tokenizer.model))
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"text": "w{i} w{i} w{i}"}}\n' for i in range(100)))
    data = open_dataset(config(tmp_path, path=str(path), val_fraction=0.2))
    held_out = data.manifest["splits"]["validation"]["documents"]
    assert data.tokenizer.vocab_size == 2 + 100 - held_out < 100


def test_bytes_and_perplexity_are_per_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line with its end has as many bytes as its words, and exp of the mean loss is over words and <eos>."""
    tokenizer = load_words(["the naïve cat\nsat"])
    line = "the naïve cat sat\n"
    assert tokenizer.n_bytes[tokenizer.encode(line)].sum() == len(line.encode())
    assert tokenizer.n_bytes[[0, 1]].tolist() == [0, 0]
    assert tokenizer.decode(tokenizer.encode("the cat\n\nsat")) == "the cat\n\nsat"
    counts = Counter(tokenizer.encode("the cat\nthe cat\nthe").tolist())
    assert counts == {tokenizer.encode("the")[0]: 3, tokenizer.encode("cat")[0]: 2, 0: 2}
    # A long text is not cut: a cut would begin a line.
    monkeypatch.setattr("ngpt_train.data.tokenizers.tokenizer.STRETCH", 50)
    monkeypatch.setattr("ngpt_train.data.tokenizers.tokenizer.SEARCHED", 20)
    text = "the cat sat\n" * 30 + "cat " * 30
    np.testing.assert_array_equal(encode_document(tokenizer, text), tokenizer.encode(text))


def test_words_written_and_read(tmp_path: Path) -> None:
    """A run's file of words serves as tokenizer.path; a faulty one is refused."""
    tokenizer = load_words(["a b c"])
    entry = write_tokenizer(tokenizer, tmp_path)
    again = read_tokenizer(tmp_path, entry)
    assert (again.fingerprint, again.encode("c x").tolist()) == (tokenizer.fingerprint, [4, 1])
    given = load_tokenizer(TokenizerConfig(kind="words", path=str(tmp_path / str(entry["file"]))))
    assert given.fingerprint == tokenizer.fingerprint
    for text in (b"<unk>\n<eos>\n", b"<eos>\na\n", b"<eos>\n<unk>\na b\n", b"<eos>\n<unk>\na\na\n", b"<eos>\n\xff\n"):
        (tmp_path / "other.txt").write_bytes(text)
        with pytest.raises(DataError, match=r"tokenizer\.path=.*a word a line"):
            load_tokenizer(TokenizerConfig(kind="words", path=str(tmp_path / "other.txt")))


def test_val_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data=wikitext103's way: files of one data set train and validate, each by its glob, rows are lines."""
    names = {"v1/train-0.parquet": LINES * 9, "v1/validation-0.parquet": HELD_OUT, "raw/train-0.parquet": ["x"]}
    files = {name: Path(written(tmp_path / "file.parquet", lines)).read_bytes() for name, lines in names.items()}
    with serving(Hub("someone/words", files)) as hub:
        known_to(hub.address, tmp_path, monkeypatch)
        keys = {"kind": "hf", "repo": "someone/words", "revision": COMMIT, "files": "v1/train-*", "streaming": False}
        cfg = config(tmp_path, **keys, val_files="v1/validation-*", keep_empty=True)
        data = open_dataset(cfg)
        words = vocabulary(data.tokenizer.model)
        assert "bird" not in words  # which only the validation files have
        assert len(data.train) == sum(len(line.split()) + 1 for line in LINES * 9)
        assert ids_of(data.validation).tolist() == papers_ids(HELD_OUT, words)
        for glob, says in {"v1/test-*": "matches no file of someone/words", "v1/*": "none is left to train on"}.items():
            with pytest.raises(DataError, match=rf"data\.val_files=.*{says}"):
                open_dataset(config(tmp_path, **keys, val_files=glob))


def test_val_files_without_text(tmp_path: Path) -> None:
    train, empty = written(tmp_path / "t.txt", LINES), written(tmp_path / "v.txt", [])
    for path, held_out, says in [(train, empty, "no text in data.val_files"), (empty, train, "no text in all of its")]:
        with pytest.raises(DataError, match=says):
            open_dataset(config(tmp_path, path=path, val_files=held_out))
    with pytest.raises(DataError, match=r"data\.val_files=.*: all files of data\.path="):
        open_dataset(config(tmp_path, path=train, val_files=train))
    with pytest.raises(DataError, match=r"data\.val_files=nowhere\.txt: no such file"):
        open_dataset(config(tmp_path, path=train, val_files="nowhere.txt"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data=local", "data.path=x", "data.streaming=true", "data.val_files=y"], "data.val_files"),
        (["data=local", "data.path=x", "data.streaming=true", "data.keep_empty=true"], "data.keep_empty"),
        (["data=local", "data.path=x", "data.streaming=true", "tokenizer=words"], "counting the words"),
        (["data=embedded", "data.val_files=y"], "no files to choose from"),
        (
            ["data=mixture", "data.mixture=a 1 embedded; b 1 hf x/y", "tokenizer=words"],
            "words of a mixture",
        ),
    ],
)
def test_what_streamed_text_does_not_do(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(overrides)


def test_t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of ours in T5's place, whose file is not at hand: 100 ids more than pieces, which no text becomes.

    Caught: a prepared directory or a checkpoint that forgets the sentinels, or takes the bare file's for them.
    """
    model = foreign_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ours = replace(model_files.PINNED["t5"], sha256=hashlib.sha256(model).hexdigest(), vocab_size=500)
    monkeypatch.setitem(model_files.PINNED, "t5", ours)
    path = tmp_path / "spiece.model"
    path.write_bytes(model)
    tokenizer = load_tokenizer(TokenizerConfig(kind="t5", path=str(path)))
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.name) == (500, 1, "t5")
    assert tokenizer.n_bytes[400:].tolist() == [0] * 100
    ids = tokenizer.encode("for item in batch <extra_id_0> </s>")
    assert ids.max() < 400
    assert {0, 1}.isdisjoint(ids.tolist())
    assert tokenizer.decode([*ids, 499, 400]) == tokenizer.decode(ids)
    again = read_tokenizer(tmp_path, write_tokenizer(tokenizer, tmp_path))
    assert (again.vocab_size, again.name) == (500, "t5")

    corpus = written(tmp_path / "text.txt", [f"def step_{i}(state, batch):\n" for i in range(200)])
    for kind in ("sentencepiece", "t5", "sentencepiece"):
        cfg = config(tmp_path, path=corpus)
        cfg.tokenizer.kind, cfg.tokenizer.path = kind, str(path)
        expected = 500 if kind == "t5" else 400
        assert open_dataset(cfg).tokenizer.vocab_size == expected
    cfg.tokenizer.kind = "t5"
    assert open_dataset(cfg, tokenizer=again).tokenizer.vocab_size == 500


def test_vocabularies_that_are_known_without_a_file() -> None:
    sizes = {"bytes": 257, "gpt2": 50257, "llama2": 32000, "mistral32k": 32000, "t5": 32100}
    assert {kind: known_vocabulary(kind) for kind in sizes} == sizes
    assert known_vocabulary("sentencepiece") is known_vocabulary("words") is None
    for kind in ("gpt2", "mistral32k"):  # whose files are at hand
        assert load_tokenizer(TokenizerConfig(kind=kind)).vocab_size == sizes[kind]
    for arguments in (["tokenizer=t5"], ["tokenizer=words", "tokenizer.vocab_size=32100"]):
        assert plan.planned_vocabulary(load_config(arguments)) == 32100
