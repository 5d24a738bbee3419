"""Tokenizers: text comes back exactly, nothing in a text becomes a special id, n_bytes adds up."""

from __future__ import annotations

import base64
import io
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from ngpt_train.config.keys import DataError
from ngpt_train.config.schema import TokenizerConfig
from ngpt_train.data import Tokenizer, load_tokenizer, read_tokenizer, write_tokenizer
from ngpt_train.data import tokenizer as module

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
    return module.GPT2Tokenizer({token: rank for rank, token in enumerate(tokens)})


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return load_tokenizer(TokenizerConfig(vocab_size=400), CORPUS)


@pytest.fixture(params=["bytes", "sentencepiece", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, trained: Tokenizer) -> Tokenizer:
    return {"bytes": module.BytesTokenizer, "sentencepiece": lambda: trained, "gpt2": gpt2_like}[request.param]()


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    alphabet = "ab \n\t\0▁é😀</s>"
    texts = AWKWARD + CORPUS[:3] + ["".join(rng.choices(alphabet, k=rng.randrange(1, 30))) for _ in range(300)]
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(row) for row in ids] == texts
    assert [int(tokenizer.n_bytes[row].sum()) for row in ids] == [len(text.encode()) for text in texts]
    assert all(tokenizer.eos not in row and row.max(initial=0) < tokenizer.vocab_size for row in ids)
    assert tokenizer.n_bytes[tokenizer.eos] == 0
    assert tokenizer.decode([tokenizer.eos]) == ""
    alone = tokenizer.encode_batch(texts[5:6])[0]
    np.testing.assert_array_equal(alone, ids[5])


def test_stored_beside_the_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    entry = write_tokenizer(tokenizer, tmp_path)
    again = read_tokenizer(tmp_path, entry)
    assert (again.name, again.vocab_size, again.eos, again.fingerprint) == (
        tokenizer.name,
        tokenizer.vocab_size,
        tokenizer.eos,
        tokenizer.fingerprint,
    )
    np.testing.assert_array_equal(again.encode_batch(AWKWARD)[4], tokenizer.encode_batch(AWKWARD)[4])
    if entry["file"] is not None:
        (tmp_path / entry["file"]).write_bytes(tokenizer.model + b"\n")
        with pytest.raises(DataError, match="checksum differs"):
            read_tokenizer(tmp_path, entry)


def test_training_is_deterministic_and_compresses(trained: Tokenizer) -> None:
    assert load_tokenizer(TokenizerConfig(vocab_size=400), CORPUS).fingerprint == trained.fingerprint
    assert trained.vocab_size == 400
    assert len(trained.encode_batch(CORPUS[:1])[0]) < len(CORPUS[0]) / 2.5


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
    (ids,) = tokenizer.encode_batch([text])
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

    monkeypatch.setattr(openai_public, "gpt2", refused)
    with pytest.raises(DataError, match=r"ConnectionError.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer(TokenizerConfig(kind="gpt2"))

    monkeypatch.setattr(openai_public, "gpt2", lambda: time.sleep(3))
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no answer.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer(TokenizerConfig(kind="gpt2"))
    assert time.monotonic() - start < 2


def test_gpt2_ranks_are_kept_in_tiktokens_own_format() -> None:
    first = gpt2_like().model.splitlines()[0]
    assert first == base64.b64encode(b"\0") + b" 0"
