"""A tokenizer's files beside a model: transformers' and our own.

tokenizer.json gives the same ids for any text, except for `<eos>` in `words`. The spelling of a special token is text,
as in training: tokenizer_config.json sets split_special_tokens.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_json, read_whole, write_json
from ngpt_train.data.tokenizers import read_tokenizer, write_tokenizer
from ngpt_train.data.tokenizers.gpt2 import byte_of_character, parse_ranks
from ngpt_train.data.tokenizers.hugging_face import HuggingFaceTokenizer
from ngpt_train.data.tokenizers.sentence_piece import SPACE_SYMBOL, SentencePieceTokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer

OWN = "ngpt_train_tokenizer"  # the folder of our own files, in the form of a checkpoint
DESCRIPTION = "tokenizer.json"  # in that folder
OF_TRANSFORMERS, OF_SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
EOS = "eos_token of tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
Json = dict[str, Any]
BPE = 2  # of SentencePiece's model_type
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # types of a piece; 4: the user's own, 5: not used


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
    (directory / OF_TRANSFORMERS).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
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
        problem = f"there is no tokenizer: neither {OWN}/, nor {OF_TRANSFORMERS}, nor {OF_SENTENCEPIECE}"
        raise DataError(f"{directory}: {problem}. Copy the model's tokenizer into it")
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
    problem = "tokenizer_config.json has no eos_token, and eos_token_id of config.json is no number"
    raise DataError(f"{directory}: which token ends a text? {problem}. Write one of them")


class NoCounterpartError(Exception):
    """No tokenizer.json gives the same ids. The message is the reason."""


def tokenizer_json(tokenizer: Tokenizer, eos_in_front: bool) -> tuple[Json, str]:
    """The content of tokenizer.json, and the name of the end-of-text token. eos_in_front: adds this token in front of a
    text, as for a decoder. Raises NoCounterpartError."""
    content, eos = _COUNTERPARTS[tokenizer.kind](tokenizer)
    template = [{"SpecialToken": {"id": eos, "type_id": 0}}] if eos_in_front else []
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {eos: {"id": eos, "ids": [tokenizer.eos], "tokens": [eos]}} if eos_in_front else {}
    texts = {"single": [*template, first], "pair": [*template, first, second]}
    content["post_processor"] = {"type": "TemplateProcessing", **texts, "special_tokens": special}
    return content, eos


def _bytes(tokenizer: Tokenizer) -> tuple[Json, str]:
    """Byte b is the id b, spelled by GPT-2's character for it."""
    return _byte_level(byte_of_character(), [], tokenizer.eos, words=False), END_OF_TEXT


def _gpt2(tokenizer: Tokenizer) -> tuple[Json, str]:
    character_of = {byte: character for character, byte in byte_of_character().items()}
    ranks = parse_ranks(tokenizer.model)

    def spelled(token: bytes) -> str:
        return "".join(character_of[byte] for byte in token)

    merges = [list(map(spelled, _parts(token, ranks))) for token in sorted(ranks, key=ranks.__getitem__)[256:]]
    return _byte_level({spelled(token): rank for token, rank in ranks.items()}, merges, tokenizer.eos), END_OF_TEXT


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two parts of a merged token: merges of lower rank turn its bytes into them."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _hf(tokenizer: Tokenizer) -> tuple[Json, str]:
    """The file itself; `tokenizer_json` replaces its post-processor."""
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return {**parse_json(tokenizer.model), "truncation": None, "padding": None}, tokenizer.eos_piece


def _words(tokenizer: Tokenizer) -> tuple[Json, str]:
    """A new line is <eos>, so its name in the file is the new line. A text that spells <eos> becomes <unk>."""
    words = tokenizer.model.decode().removesuffix("\n").split("\n")
    vocab = {"\n" if i == tokenizer.eos else word: i for i, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    # Python's white space: Unicode's, and four more separators.
    between = {"type": "Split", "pattern": {"Regex": r"[^\S\n]+|[\x1c-\x1f]+"}, "behavior": "Removed", "invert": False}
    lines = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False}
    last = {"type": "Replace", "pattern": {"Regex": r"\n\z"}, "content": ""}
    steps = {"type": "Sequence", "pretokenizers": [lines, between]}
    return _file(model, {"\n": tokenizer.eos}, normalizer=last, pre_tokenizer=steps), "\n"


def _sentencepiece(tokenizer: Tokenizer) -> tuple[Json, str]:
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except Exception as error:  # protobuf's own, for a version that is older than sentencepiece's
        fix = "pip install -U protobuf sentencepiece"
        raise NoCounterpartError(f"tokenizer {tokenizer.name}: {error}; for a tokenizer.json {fix}") from None
    assert isinstance(tokenizer, SentencePieceTokenizer)
    file = ModelProto.FromString(tokenizer.model)
    if problem := _unlike(file):
        raise NoCounterpartError(f"tokenizer {tokenizer.name}: {problem}, which no tokenizer.json does in the same way")
    adds_space = file.normalizer_spec.add_dummy_prefix  # before each text
    # Without it, training turns the space symbol itself into bytes. So the file then spells the space as a space, and
    # does not know the symbol, which becomes bytes.
    spelled = [entry.piece if adds_space else entry.piece.replace(SPACE_SYMBOL, " ") for entry in file.pieces]
    unknown = next((spelled[i] for i, entry in enumerate(file.pieces) if entry.type == UNKNOWN), None)
    model = _bpe({piece: i for i, piece in enumerate(spelled)}, _merges(spelled, file))
    model |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    normalizer: Json | None = None
    decoders: list[Json] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if adds_space:
        space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_SYMBOL}
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE_SYMBOL}, space]}
        decoders.insert(0, {"type": "Replace", "pattern": {"String": SPACE_SYMBOL}, "content": " "})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    special = {spelled[i]: i for i, entry in enumerate(file.pieces) if entry.type in (UNKNOWN, CONTROL)}
    decoder = {"type": "Sequence", "decoders": decoders}
    return _file(model, special, normalizer=normalizer, decoder=decoder), spelled[tokenizer.eos]


def _unlike(file: Any) -> str | None:
    """Names a property that BPE with byte fallback lacks; None if there is none."""
    if file.trainer_spec.model_type != BPE:
        return "it is no byte-pair encoding"
    if file.normalizer_spec.precompiled_charsmap or file.normalizer_spec.remove_extra_whitespaces:
        return "it normalises the text"
    if not file.trainer_spec.byte_fallback:
        return "it does not fall back to bytes"
    own = any(entry.type not in (NORMAL, UNKNOWN, CONTROL, BYTE) for entry in file.pieces)
    return "it has pieces of the user's own" if own else None


def _merges(spelled: Sequence[str], file: Any) -> list[list[str]]:
    """All pairs of pieces that make a piece, in SentencePiece's order: the highest score of the made piece first."""
    normal = [i for i, entry in enumerate(file.pieces) if entry.type == NORMAL]
    usable = {spelled[i] for i in normal}
    found = []
    for i in sorted(normal, key=lambda i: (-file.pieces[i].score, i)):
        cuts = range(1, len(spelled[i]))
        pairs = ([spelled[i][:cut], spelled[i][cut:]] for cut in cuts)
        found += [pair for pair in pairs if usable.issuperset(pair)]
    return found


def _byte_level(vocab: dict[str, int], merges: list[list[str]], eos: int, words: bool = True) -> Json:
    """GPT-2's tokenizer on bytes. words: cuts text into GPT-2's words first."""
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    return _file(_bpe(vocab, merges), {END_OF_TEXT: eos}, pre_tokenizer=step, decoder=step)


def _bpe(vocab: dict[str, int], merges: list[list[str]]) -> Json:
    nothing = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **nothing, **off, "vocab": vocab, "merges": merges}


def _file(model: Json, special: Mapping[str, int], **steps: Json | None) -> Json:
    """A tokenizer.json. special: its special tokens, by name."""
    flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
    added = [{"id": i, "content": name, **flags} for name, i in special.items()]
    content: Json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    content |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {**content, **steps, "model": model}


_COUNTERPARTS = {"bytes": _bytes, "gpt2": _gpt2, "hf": _hf, "sentencepiece": _sentencepiece, "words": _words}
