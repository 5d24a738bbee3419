"""Tokenizers: text comes back exactly, nothing in a text becomes a special id, n_bytes adds up."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import sentencepiece
import tokenizers

from ngpt_train.config.schema import TokenizerConfig
from ngpt_train.core.errors import DataError
from ngpt_train.data.tokenizers import (
    BytesTokenizer,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    model_files,
    read_tokenizer,
    write_tokenizer,
)
from ngpt_train.data.tokenizers import gpt2 as gpt2_module
from ngpt_train.data.tokenizers import tokenizer as interface
from ngpt_train.data.tokenizers.gpt2 import parse_ranks
from ngpt_train.data.tokenizers.tokenizer import Tokenizer, encode_document

CORPUS = [
    f"def step_{i}(state, batch):\n    for item in batch[{i}:]:\n\tstate.add(item)  # the {i * 37}th\n" * 3
    for i in range(200)
]
AWKWARD = [
    "",
    " ",
    "  leading and trailing  \n",
    "tabs\t\tand\r\nnewlines\n\n\n",
    "    indented\n        deeper\n",
    "emoji 😀👩‍👩‍👧 e\u0301 ﬁ Ⅷ \ufeff",
    "NUL \0 bell \x07 \x7f \u2028",
    "the space symbol ▁ and ▁▁ and ▁",
    "</s><s><unk><|endoftext|><0x41> ⁇ \u2585",
    "日本語 \U0010fffe",
]


def gpt2_like() -> Tokenizer:
    """GPT-2's class on a vocabulary small enough to write down: every byte, then a few merges."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"  ", b"    ", b"en", b"<|"]
    return GPT2Tokenizer({token: rank for rank, token in enumerate(tokens)})


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return load_tokenizer(TokenizerConfig(vocab_size=400), CORPUS)


def tokenizer_json(special: Sequence[str] = ("<unk>", "</s>"), byte_level: bool = True) -> bytes:
    """A tokenizer.json as Hugging Face's library writes it, of GPT-2's or of LLaMA's kind."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=not byte_level))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    if byte_level:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
    else:
        tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        steps = tokenizers.decoders
        tokenizer.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse()])
        special = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [added for added in described["added_tokens"] if not added["content"].startswith("<0x")]
    return json.dumps(described).encode()


@pytest.fixture(params=["bytes", "sentencepiece", "gpt2", "hf"])
def tokenizer(request: pytest.FixtureRequest, trained: Tokenizer) -> Tokenizer:
    kinds = {
        "bytes": BytesTokenizer,
        "sentencepiece": lambda: trained,
        "gpt2": gpt2_like,
        "hf": lambda: HuggingFaceTokenizer(tokenizer_json(), None, "here"),
    }
    return kinds[request.param]()


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    alphabet = "ab \n\t\0▁é😀</s>"
    texts = AWKWARD + CORPUS[:3] + ["".join(rng.choices(alphabet, k=rng.randrange(1, 30))) for _ in range(300)]
    ids = [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(row) for row in ids] == texts
    assert [int(tokenizer.n_bytes[row].sum()) for row in ids] == [len(text.encode()) for text in texts]
    assert all(tokenizer.eos not in row and row.max(initial=0) < tokenizer.vocab_size for row in ids)
    assert tokenizer.n_bytes[tokenizer.eos] == 0
    assert tokenizer.decode([tokenizer.eos]) == ""


def long_texts() -> list[str]:
    """With spaces, with lines alone, with neither, and with nothing but space."""
    text = "".join(CORPUS[:40]) + " ".join(AWKWARD[2:6]) * 20
    no_spaces = text.replace(" ", "")
    return [text, no_spaces, no_spaces.replace("\n", ""), " " * 5000, "\n" * 5000, "é😀" * 2000, "a  b\n" * 900]


def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "STRETCH", 997)
    monkeypatch.setattr(interface, "SEARCHED", 200)


def test_long_documents_are_encoded_in_stretches(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [tokenizer.encode(text) for text in long_texts()]
    for text, ids in zip(long_texts(), plain, strict=True):
        np.testing.assert_array_equal(encode_document(tokenizer, text), ids)
    short_stretches(monkeypatch)
    for text, ids in zip(long_texts(), plain, strict=True):
        found = encode_document(tokenizer, text)
        assert tokenizer.decode(found.tolist()) == text
        assert len(found) <= len(ids) + 4 * len(text) // 700
    np.testing.assert_array_equal(encode_document(tokenizer, long_texts()[0]), plain[0])


@pytest.mark.parametrize("kind", ["llama", "mistral32k", "hf"])
def test_a_space_before_each_text_is_not_put_before_each_stretch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that encode `text` as ` text`, and take the space away when they decode."""
    if kind == "llama":
        (tmp_path / "model").write_bytes(foreign_model(**LLAMA))
        tokenizer = load_tokenizer(TokenizerConfig(path=str(tmp_path / "model")))
    elif kind == "hf":
        described = json.loads(tokenizer_json(byte_level=False))
        replaced = described["normalizer"]
        described["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced]}
        described["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        tokenizer = HuggingFaceTokenizer(json.dumps(described).encode(), None, "here")
    else:
        tokenizer = load_tokenizer(TokenizerConfig(kind="mistral32k"))
    texts = [text.replace("▁", "") for text in long_texts()]
    plain = [tokenizer.encode(text) for text in texts]
    short_stretches(monkeypatch)
    for text in texts:
        assert tokenizer.decode(encode_document(tokenizer, text).tolist()) == text
    if kind != "hf":  # the one here is trained without words, and has pieces that span them
        np.testing.assert_array_equal(encode_document(tokenizer, texts[0]), plain[0])


def test_a_copy_in_another_process_encodes_alike(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.fingerprint, copy.eos, copy.vocab_size) == (tokenizer.fingerprint, tokenizer.eos, tokenizer.vocab_size)
    for text in AWKWARD:
        ids, again = tokenizer.encode(text), copy.encode(text)
        np.testing.assert_array_equal(ids, again)


def test_stored_beside_the_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    entry = write_tokenizer(tokenizer, tmp_path)
    again = read_tokenizer(tmp_path, entry)
    assert (again.name, again.vocab_size, again.eos, again.fingerprint) == (
        tokenizer.name,
        tokenizer.vocab_size,
        tokenizer.eos,
        tokenizer.fingerprint,
    )
    np.testing.assert_array_equal(again.encode(AWKWARD[4]), tokenizer.encode(AWKWARD[4]))
    if entry["file"] is not None:
        (tmp_path / entry["file"]).write_bytes(tokenizer.model + b"\n")
        with pytest.raises(DataError, match="checksum differs"):
            read_tokenizer(tmp_path, entry)


def test_training_is_deterministic_and_compresses(trained: Tokenizer) -> None:
    assert load_tokenizer(TokenizerConfig(vocab_size=400), CORPUS).fingerprint == trained.fingerprint
    assert trained.vocab_size == 400
    assert len(trained.encode(CORPUS[0])) < len(CORPUS[0]) / 2.5


def test_vocabulary_that_does_not_fit_the_corpus() -> None:
    with pytest.raises(DataError, match="largest that works is") as caught:
        load_tokenizer(TokenizerConfig(vocab_size=50_000), CORPUS)
    largest = int(str(caught.value).split("largest that works is ")[1].split()[0])
    assert load_tokenizer(TokenizerConfig(vocab_size=largest), CORPUS).vocab_size == largest
    many_characters = ["".join(chr(0x4E00 + i) for i in range(400))]
    with pytest.raises(DataError, match="smallest that works is"):
        load_tokenizer(TokenizerConfig(vocab_size=300), many_characters)


# A space before each text, and special ids, as LLaMA-2's model has them.
LLAMA: dict[str, Any] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
}


def foreign_model(**options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=400, model_type="bpe", minloglevel=2, **options
    )
    return model.getvalue()


def test_foreign_model_files(tmp_path: Path) -> None:
    path = tmp_path / "llama.model"
    path.write_bytes(foreign_model(**LLAMA))
    tokenizer = load_tokenizer(TokenizerConfig(path=str(path)))
    assert (tokenizer.eos, tokenizer.vocab_size) == (2, 400)
    text = "for item in batch </s> ▁ 😀"
    ids = tokenizer.encode(text)
    assert 2 not in ids
    # LLaMA's models write the space symbol and the space alike.
    assert tokenizer.decode(ids) == text.replace("▁", " ")

    path.write_bytes(foreign_model(eos_id=-1))
    with pytest.raises(DataError, match="no end-of-sentence"):
        load_tokenizer(TokenizerConfig(path=str(path)))
    path.write_bytes(b"no model")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        load_tokenizer(TokenizerConfig(path=str(path)))
    with pytest.raises(DataError, match=r"tokenizer\.path=.*No such file"):
        load_tokenizer(TokenizerConfig(path=str(tmp_path / "none")))
    with pytest.raises(DataError, match="tokenizer=gpt2"):
        load_tokenizer(TokenizerConfig())


def test_gpt2_without_a_network_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiktoken_ext import openai_public

    def refused() -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(gpt2_module, "PACKAGED", ("no_such_package", "vocab.bpe"))
    monkeypatch.setattr(openai_public, "gpt2", refused)
    with pytest.raises(DataError, match=r"ConnectionError.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer(TokenizerConfig(kind="gpt2"))

    monkeypatch.setattr(openai_public, "gpt2", lambda: time.sleep(3))
    monkeypatch.setattr(model_files, "DOWNLOAD_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no answer.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer(TokenizerConfig(kind="gpt2"))
    assert time.monotonic() - start < 2


def test_gpt2_from_a_package_or_a_file(tmp_path: Path) -> None:
    """GPT-2's own ids. The ranks rebuilt from the merges are tiktoken's published ranks, byte for byte."""
    packaged = model_files.package_file(*gpt2_module.PACKAGED)
    assert packaged is not None
    for config in (TokenizerConfig(kind="gpt2"), TokenizerConfig(kind="gpt2", path=str(packaged))):
        tokenizer = load_tokenizer(config)
        assert (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos) == (gpt2_module.R50K_SHA256, 50257, 50256)
        assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    ranks = tmp_path / "r50k_base.tiktoken"
    ranks.write_bytes(tokenizer.model)
    assert load_tokenizer(TokenizerConfig(kind="gpt2", path=str(ranks))).fingerprint == tokenizer.fingerprint
    ranks.write_bytes(tokenizer.model[:-20])
    with pytest.raises(DataError, match=r"r50k_base\.tiktoken: not GPT-2's vocabulary; known are vocab\.bpe"):
        load_tokenizer(TokenizerConfig(kind="gpt2", path=str(ranks)))


def test_gpt2_words_found_without_looking_ahead_are_gpt2s() -> None:
    """Runs of any whitespace before and after anything: the ids of the pattern that looks ahead.

    Catches a pattern in another order, a run cut elsewhere, Unicode's spaces or control characters taken for others.
    """
    tokenizer = load_tokenizer(TokenizerConfig(kind="gpt2"))
    assert isinstance(tokenizer, GPT2Tokenizer)
    published, quick = tokenizer._encoding, tokenizer._quick
    rng = random.Random(0)
    spaces = [" ", " ", " ", "\n", "\n", "\t", "\r", "\v", "\f"]
    others = ["a", "B", "é", "日", "1", "²", "'", "s", "'ll", "!", "…", "\x1c", "\x1f", "\x07", "\u200b", "\ufeff"]
    wide = ["\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u202f", "\u205f", "\u3000", "\0"]
    for number in range(20_000):
        alphabet = spaces + others * (number % 2) + wide * (number % 5 == 0) + ["word", "."]
        text = "".join(rng.choices(alphabet, k=rng.randrange(13)))
        assert tokenizer.encode(text).tolist() == published.encode_ordinary(text), repr(text)
    # A run and its zero byte are one word there: no token of whitespace may merge otherwise than alone.
    ranks = parse_ranks(tokenizer.model)
    assert [token for token in ranks if b"\0" in token] == [b"\0"]
    whitespace = {token: rank for token, rank in ranks.items() if token.isspace()}
    assert len(whitespace) > 5
    for token, rank in whitespace.items():
        assert quick.encode_ordinary(token.decode() + "\0") == [rank, ranks[b"\0"]]


def test_mistral32k_from_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(kind="mistral32k"))
    assert (tokenizer.name, tokenizer.kind, tokenizer.vocab_size, tokenizer.eos) == (
        "mistral32k",
        "sentencepiece",
        32000,
        2,
    )
    text = CORPUS[0] + "emoji 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    monkeypatch.setattr(model_files, "MISTRAL_FILE", ("no_such_package", "tokenizer.model"))
    with pytest.raises(DataError, match=r"tokenizer=mistral32k.*mistral-common.*\[tokenizers\]"):
        load_tokenizer(TokenizerConfig(kind="mistral32k"))


def test_llama2_from_the_hub_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of ours in LLaMA-2's place, whose file is not at hand."""
    model = foreign_model(**LLAMA)
    file = tmp_path / "tokenizer.model"
    file.write_bytes(model)
    with pytest.raises(DataError, match="not the model file that tokenizer=llama2 stands for: sha256"):
        load_tokenizer(TokenizerConfig(kind="llama2", path=str(file)))

    ours = replace(model_files.PINNED["llama2"], sha256=hashlib.sha256(model).hexdigest())
    monkeypatch.setitem(model_files.PINNED, "llama2", ours)
    asked = []

    def hub(*given: str, **more: str) -> str:
        asked.append((*given, *more.values()))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(file))
    tokenizers_found = [load_tokenizer(TokenizerConfig(kind="llama2", path=path)) for path in (str(file), None)]
    assert [found.fingerprint for found in tokenizers_found] == [ours.sha256] * 2
    assert tokenizers_found[0].name == "llama2"
    assert asked == [model_files.LLAMA2_COPY]

    def refused(*_: str, **__: str) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refused)
    with pytest.raises(DataError, match=r"tokenizer=llama2.*ConnectionError.*tokenizer\.path=FILE.*mistral32k"):
        load_tokenizer(TokenizerConfig(kind="llama2"))


def test_a_tokenizer_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a download that huggingface_hub repeats for half a minute where the first request finds no network; a
    message that does not name the tokenizers that need none."""

    class Nowhere:
        def head(self, url: str) -> None:
            raise ConnectionError(url)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "get_session", Nowhere)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("not reachable"))
    with pytest.raises(DataError, match=r"ConnectionError.*tokenizer\.path=FILE.*mistral32k.*=sentencepiece"):
        load_tokenizer(TokenizerConfig(kind="llama2"))
    with pytest.raises(DataError, match=r"tokenizer=t5: spiece\.model.*ConnectionError.*tokenizer\.path=FILE"):
        load_tokenizer(TokenizerConfig(kind="t5"))


def test_hugging_face_of_llamas_kind(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_json(byte_level=False))
    tokenizer = load_tokenizer(TokenizerConfig(kind="hf", path=str(path)))
    for text in (CORPUS[0], "emoji 😀 é", "</s> <unk>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.n_bytes[ids].sum() == len(text.encode())
        assert tokenizer.eos not in ids


def test_which_piece_ends_a_document(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def load(eos: str | None = None) -> Tokenizer:
        return load_tokenizer(TokenizerConfig(kind="hf", path=str(path), eos=eos))

    path.write_bytes(tokenizer_json(["<end>", "<pad>"]))
    assert load("<end>").eos == 0
    with pytest.raises(DataError, match=r"which piece ends a document\? Set tokenizer.eos .*: '<end>', '<pad>'"):
        load()
    with pytest.raises(DataError, match="no special piece 'def'"):
        load("def")
    path.write_bytes(tokenizer_json(["</s>", "<|endoftext|>"]))
    with pytest.raises(DataError, match="which piece ends a document"):
        load()
    assert load("<|endoftext|>").eos == 1


def test_files_that_are_no_tokenizer_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    config = TokenizerConfig(kind="hf", path=str(path))
    path.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.path=.*: not a tokenizer\.json"):
        load_tokenizer(config)
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.add_special_tokens(["</s>"])
    path.write_text(words.to_str())
    with pytest.raises(DataError, match="how many bytes a piece stands for"):
        load_tokenizer(config)
