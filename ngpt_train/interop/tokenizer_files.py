"""A tokenizer's files beside a model: transformers' and our own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, read_whole, write_json
from ngpt_train.data.tokenizers import read_tokenizer, write_tokenizer
from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ngpt_train.data.tokenizers.sentence_piece import SentencePieceTokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.interop.tokenizer_json import NoCounterpartError, tokenizer_json

OWN = "ngpt_train_tokenizer"  # the folder of our own files, in the form of a checkpoint
DESCRIPTION = "tokenizer.json"  # in that folder
OF_TRANSFORMERS, OF_SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
EOS = "eos_token of tokenizer_config.json"


def write_tokenizers(directory: Path, tokenizer: Tokenizer, context: int, eos_in_front: bool) -> str:
    """Writes tokenizer.json and tokenizer_config.json for AutoTokenizer, and our own files into the folder OWN.
    Returns a sentence for the output.

    eos_in_front: the model reads the end-of-text token before a text.
    """
    own = directory / OWN
    own.mkdir()
    write_json(own / DESCRIPTION, write_tokenizer(tokenizer, own))
    try:
        content, eos = tokenizer_json(tokenizer, eos_in_front)
    except NoCounterpartError as problem:
        return f"no tokenizer for transformers: {problem}; {OWN}/ has the tokenizer in the files of ngpt-train"
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": eos,  # in training each document comes after the end of another
            "eos_token": eos,
            "pad_token": eos,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,  # a text that spells a special token is text, as in training
        },
    )
    front = f"with {eos!r} in front of a text" if eos_in_front else "with nothing in front of a text"
    return f"tokenizer {tokenizer.name} for AutoTokenizer, {front}, and in the files of ngpt-train in {OWN}/"


def tokenizer_of(directory: Path, config_json: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, from our own files if they exist, and sentences for the log. Raises DataError."""
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
            "the model's tokenizer into it"
        )
    bos = config_json.get("bos_token_id")
    if bos in (None, tokenizer.eos):
        return tokenizer, []
    return tokenizer, [
        f"the model's config names the id {bos} for the beginning of a text; ngpt-train puts the end-of-text id "
        f"{tokenizer.eos} in front of each. If the model was trained with {bos}, its loss is higher here"
    ]


def _content(path: Path) -> bytes:
    try:
        return read_whole(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def _eos(directory: Path, config_json: Mapping[str, Any]) -> str | int:
    """The end-of-text token, from tokenizer_config.json or else config.json."""
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
