"""Keys of data.* and tokenizer.* that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from ngpt_train.config.keys import Conflict
from ngpt_train.config.mixture import mixture_of
from ngpt_train.config.schema import Config


def data_conflicts(config: Config) -> Iterator[Conflict]:
    """Every conflict. The config is resolved."""
    yield from _source_conflicts(config)
    yield from _row_conflicts(config)
    yield from _tokenizer_conflicts(config)


def _source_conflicts(config: Config) -> Iterator[Conflict]:
    data = config.data
    if data.kind in ("local", "tokens") and data.path is None:
        yield ("data.path", "data.kind"), "no data is named", "Set data.path=PATH"
    if data.kind == "mixture":
        sources = mixture_of(data)
        trains = config.tokenizer.kind == "sentencepiece" and config.tokenizer.path is None
        if trains and all(source.data.kind != "tokens" for source in sources):
            yield (
                ("tokenizer.path", "data.kind"),
                "no model is trained from a mixture",
                "Name one that was trained before, or choose another tokenizer",
            )
    elif data.mixture is not None:
        yield ("data.mixture", "data.kind"), "the text is no mixture", "Choose data=mixture, or leave data.mixture out"
    if data.kind == "mixture" and data.path is not None:
        yield ("data.path", "data.kind"), "a mixture names the path of each source", "Leave data.path out"
    if data.kind == "embedded" and data.path is not None:
        yield (
            ("data.path", "data.kind"),
            "the embedded text reads no path",
            "Choose data=local for text or data=tokens for prepared shards",
        )
    if data.on_hub and data.path is not None:
        yield (
            ("data.path", "data.kind"),
            "a data set of the hub reads no path",
            "Choose data=local for files, or leave data.path out",
        )
    if data.on_hub and data.repo is None:
        yield ("data.repo", "data.kind"), "no data set is named", "Set data.repo=OWNER/NAME"
    if not data.on_hub and data.repo is not None:
        yield ("data.repo", "data.kind"), "the text is not read from the hub", "Choose data=hf, or leave data.repo out"
    if not data.on_hub and data.files is not None:
        yield ("data.files", "data.kind"), "the text is not read from the hub", "Choose data=hf, or set data.path=GLOB"
    if data.kind == "tokens" and data.streamed:
        yield (
            ("data.streaming", "data.kind"),
            "prepared shards are tokens already",
            "Leave data.streaming out, or choose data=local",
        )


def _row_conflicts(config: Config) -> Iterator[Conflict]:
    data, model = config.data, config.model
    if data.objective != model.objective:
        yield (
            ("data.objective", "model.name"),
            "the model is not made for this objective",
            f"Set data.objective={model.objective}, or choose another model",
        )
    if data.objective == "prefix_continuation":
        for name, value, default in (
            ("data.pack", data.pack, "concat"),
            ("data.document_mask", data.document_mask, False),
        ):
            if value != default:
                yield (name, "data.objective"), "a row is one document then", f"Leave {name} out"


def _tokenizer_conflicts(config: Config) -> Iterator[Conflict]:
    tokenizer = config.tokenizer
    if tokenizer.path is not None and tokenizer.kind == "bytes":
        yield (
            ("tokenizer.path", "tokenizer.kind"),
            "bytes reads no model file",
            "Choose tokenizer=sentencepiece or another, or leave tokenizer.path out",
        )
    if tokenizer.path is None and tokenizer.kind == "hf":
        yield ("tokenizer.path", "tokenizer.kind"), "no tokenizer.json is named", "Set tokenizer.path=FILE"
    if tokenizer.eos is not None and tokenizer.kind != "hf":
        yield ("tokenizer.eos", "tokenizer.kind"), "the tokenizer knows its own", "Leave tokenizer.eos out"
