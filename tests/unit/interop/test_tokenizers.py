"""Tokenizers in the files of transformers give our ids."""

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ngpt_train.config.schema import TokenizerConfig
from ngpt_train.core.errors import DataError
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.data.tokenizers.sentence_piece import SentencePieceTokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.interop.tokenizer_files import NoCounterpartError, tokenizer_json, tokenizer_of, write_tokenizers

tokenizers = pytest.importorskip("tokenizers", reason="the extra [tokenizers] is not installed")

TEXT = (Path(__file__).parents[3] / "README.md").read_text()
CHARACTERS = "ab  \n.1é\u2581日\t"
AWKWARD = [
    *("", " ", "  a", "a  b   c    d", "x\u2581y \u2581", "日本語 テキスト 🎉🎉 e\u0301"),
    *("\n", "\n\na\n", "a\n", "\r\n\r\n"),
    *("<|endoftext|> </s> <unk> <eos> <s>", "tab\t\tb\x1c c\x85d\u00a0e\u2028f", "\0\0 a", "'s'S 'LL don't 12345 67"),
    *("a" * 300, " " * 37 + "b" + " " * 64, "<0x41>", "aaaa aaa aa a " * 9),
]


def texts() -> list[str]:
    generator = random.Random(0)
    mixed = ["".join(generator.choice(CHARACTERS) for _ in range(200)) for _ in range(20)]
    return [TEXT, *TEXT.split("\n\n"), *AWKWARD, *mixed]


def hf_tokenizer() -> Tokenizer:
    """A byte-level tokenizer.json with a post-processor of its own."""
    from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer

    content, _ = tokenizer_json(load_tokenizer(TokenizerConfig(kind="bytes")), eos_in_front=True)
    content["model"]["merges"] = [["a", "b"], ["ab", "a"]]
    content["model"]["vocab"] |= {"ab": 256, "aba": 257}
    content["added_tokens"][0]["id"] = 258
    return HuggingFaceTokenizer(json.dumps(content).encode(), None, "test")


def trained(kind: str, size: int) -> Callable[[], Tokenizer]:
    deep = ["deep  spaces    here\n        indented\n"] * 20
    return lambda: load_tokenizer(TokenizerConfig(kind=kind, vocab_size=size), [TEXT, *deep])


def loaded(kind: str) -> Callable[[], Tokenizer]:
    def load() -> Tokenizer:
        try:
            return load_tokenizer(TokenizerConfig(kind=kind))
        except DataError as error:
            pytest.skip(str(error))

    return load


MADE: dict[str, Callable[[], Tokenizer]] = {
    "bytes": loaded("bytes"),
    "gpt2": loaded("gpt2"),
    "sentencepiece": trained("sentencepiece", 600),
    "mistral32k": loaded("mistral32k"),
    "words": trained("words", 500),
    "hf": hf_tokenizer,
}
KINDS = {kind: functools.cache(make) for kind, make in MADE.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids(kind: str) -> None:
    """Caught: another order of merges, a space before a text too many, bytes in the place of characters, a text that
    spells a special token read as that token, and a text without the end-of-text token in front."""
    ours = KINDS[kind]()
    content, eos = tokenizer_json(ours, eos_in_front=True)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
    theirs.encode_special_tokens = True
    assert theirs.token_to_id(eos) == ours.eos
    assert theirs.get_vocab_size() == ours.vocab_size
    for text in texts():
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False).ids == ids, repr(text[:80])
        assert theirs.encode(text).ids == [ours.eos, *ids]
        if kind != "words":  # whose lines transformers separates with spaces too
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_auto_tokenizer(kind: str, tmp_path: Path) -> None:
    """Caught: a class that transformers rebuilds with steps of its own, special tokens that it does not know, and an
    encoder's tokenizer that puts the end-of-text token in front."""
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    ours = KINDS[kind]()
    for name, in_front in (("decoder", True), ("encoder", False)):
        directory = tmp_path / name
        directory.mkdir()
        write_tokenizers(directory, ours, 64, in_front)
        (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
        theirs = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.eos,) * 3
        for text in ["the model</s> <unk> <|endoftext|>\n  x  y", TEXT[:2000], ""]:
            ids = ours.encode(text).tolist()
            assert theirs(text, add_special_tokens=False).input_ids == ids
            assert theirs(text).input_ids == [ours.eos] * in_front + ids


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "hf"])
def test_our_own_files_come_back(kind: str, tmp_path: Path) -> None:
    """Caught: an import that makes another tokenizer of an export."""
    ours = KINDS[kind]()
    said = write_tokenizers(tmp_path, ours, 64, True)
    assert "for AutoTokenizer" in said
    back, notes = tokenizer_of(tmp_path, {})
    assert (back.kind, back.name, back.eos, back.model) == (ours.kind, ours.name, ours.eos, ours.model)
    assert not notes


def unigram() -> SentencePieceTokenizer:
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=300, minloglevel=2
    )
    return SentencePieceTokenizer(model.getvalue(), "test")


def test_without_counterpart(tmp_path: Path) -> None:
    """Caught: a Unigram model written as if it were a byte-pair encoding; it is said, and our own files are there."""
    ours = unigram()
    with pytest.raises(NoCounterpartError, match="no byte-pair encoding"):
        tokenizer_json(ours, eos_in_front=True)
    said = write_tokenizers(tmp_path, ours, 64, True)
    assert said.startswith("no tokenizer for transformers: ")
    assert not (tmp_path / "tokenizer.json").exists()
    assert tokenizer_of(tmp_path, {})[0].model == ours.model


def test_tokenizers_of_others(tmp_path: Path) -> None:
    """Caught: the wrong end-of-text token of a tokenizer.json, and a departure that nobody is told of."""
    content, _ = tokenizer_json(KINDS["bytes"](), eos_in_front=False)
    with pytest.raises(DataError, match="there is no tokenizer"):
        tokenizer_of(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="which token ends a text"):
        tokenizer_of(tmp_path, {"eos_token_id": [1, 2]})
    found, notes = tokenizer_of(tmp_path, {"eos_token_id": 256, "bos_token_id": 7})
    assert (found.kind, found.eos) == ("hf", 256)
    assert "names the id 7 for the beginning" in notes[0]
    for eos in (-1, 300):
        with pytest.raises(DataError, match=f"no special piece {eos}. Set eos_token of tokenizer_config.json to one"):
            tokenizer_of(tmp_path, {"eos_token_id": eos})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert tokenizer_of(tmp_path, {})[0].eos == 256
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(DataError, match=r"no special piece '</s>'\. Set eos_token of tokenizer_config.json to one"):
        tokenizer_of(tmp_path, {})
