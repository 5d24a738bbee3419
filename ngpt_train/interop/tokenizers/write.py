"""Writes a tokenizer beside an exported model: for transformers, and in our own files."""

from __future__ import annotations

import json
from pathlib import Path

from ngpt_train.core.files import write_json
from ngpt_train.data import Tokenizer
from ngpt_train.data.tokenizers import write_tokenizer
from ngpt_train.interop.tokenizers.counterparts import NoCounterpartError, tokenizer_json

OWN = "ngpt_train_tokenizer"  # the folder of our own files, in the form of a checkpoint
DESCRIPTION = "tokenizer.json"  # in that folder


def write_tokenizers(directory: Path, tokenizer: Tokenizer, context: int, eos_in_front: bool) -> list[str]:
    """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer reads, and our own files into the folder
    OWN; returns what is to be said of them.

    eos_in_front: whether the model reads the end-of-text token before a text.
    """
    own = directory / OWN
    own.mkdir()
    write_json(own / DESCRIPTION, write_tokenizer(tokenizer, own))
    try:
        content, eos = tokenizer_json(tokenizer, eos_in_front)
    except NoCounterpartError as problem:
        return [f"no tokenizer for transformers: {problem}; {OWN}/ has the tokenizer in the files of ngpt-train"]
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
    return [f"tokenizer {tokenizer.name} for AutoTokenizer, {front}, and in the files of ngpt-train in {OWN}/"]
