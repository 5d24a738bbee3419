"""Reads the tokenizer of a directory that `export` or transformers wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, read_whole
from ngpt_train.data import Tokenizer, read_tokenizer
from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ngpt_train.data.tokenizers.sentence_piece import SentencePieceTokenizer
from ngpt_train.interop.tokenizers.write import DESCRIPTION, OWN

OF_TRANSFORMERS, OF_SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
EOS = "eos_token of tokenizer_config.json"


def tokenizer_of(directory: Path, config_json: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, from our own files if they are there; and what is to be said of it. Raises DataError."""
    if (directory / OWN / DESCRIPTION).is_file():
        return read_tokenizer(directory / OWN, read_json(directory / OWN / DESCRIPTION)), []
    tokenizer: Tokenizer
    if (path := directory / OF_TRANSFORMERS).is_file():
        tokenizer = HuggingFaceTokenizer(_content(path), _eos(directory, config_json), str(path), key=EOS)
    elif (path := directory / OF_SENTENCEPIECE).is_file():
        tokenizer = SentencePieceTokenizer(_content(path), str(path))
    else:
        raise DataError(
            f"{directory}: there is no tokenizer: neither {OWN}/, nor {OF_TRANSFORMERS}, nor {OF_SENTENCEPIECE}. Copy "
            "that of the model into it"
        )
    bos = config_json.get("bos_token_id")
    if bos in (None, tokenizer.eos):
        return tokenizer, []
    return tokenizer, [
        f"the model's config names the id {bos} for the beginning of a text; ngpt-train puts the end-of-text id "
        f"{tokenizer.eos} in front of each. Where the model was trained with the other one, its loss is higher here"
    ]


def _content(path: Path) -> bytes:
    try:
        return read_whole(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def _eos(directory: Path, config_json: Mapping[str, Any]) -> str | int:
    """The token that ends a text, by tokenizer_config.json, or else by config.json."""
    path = directory / "tokenizer_config.json"
    described = read_json(path) if path.is_file() else {}
    named = described.get("eos_token") if isinstance(described, dict) else None
    if isinstance(named, dict):  # an AddedToken
        named = named.get("content")
    number = config_json.get("eos_token_id")
    if isinstance(named, str):
        return named
    if type(number) is int:
        return number
    raise DataError(
        f"{directory}: which token ends a text? tokenizer_config.json has no eos_token, and eos_token_id of "
        "config.json is no number. Write one of them"
    )
