"""The keys tokenizer.*: text to ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Union

from ngpt_train.config.keys import Conflict, key


@dataclass
class TokenizerConfig:
    """Text to ids. The data group chooses it; prepared tokens bring their own."""

    may_change: ClassVar = ("path",)  # as data.path

    kind: str = key(
        "sentencepiece",
        "bytes; sentencepiece (model file, or trained from the corpus); llama2, mistral32k (SentencePiece models of "
        "32,000 pieces); t5 (SentencePiece, 32,100 ids); gpt2 (tiktoken); hf (a tokenizer.json); words (between white "
        "space, as in Penn Treebank). Prepared shards bring theirs.",
        choices=("bytes", "sentencepiece", "llama2", "mistral32k", "t5", "gpt2", "hf", "words"),
    )
    path: Union[str, None] = key(
        None,
        "Model file; null trains a SentencePiece model from the corpus or counts its words, and finds the well-known "
        "ones elsewhere.",
    )
    eos: Union[str, None] = key(None, "hf: piece that ends a document; null takes the usual one, if there is one.")
    vocab_size: int = key(
        4096,
        "Pieces of a model trained from the corpus; words: the most frequent, <eos> and <unk> included, at most.",
        minimum=300,
        maximum=1_000_000,
    )

    @property
    def from_text(self) -> bool:
        """Whether the tokenizer is made from the text that it is to encode."""
        return self.kind in ("sentencepiece", "words") and self.path is None

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that exclude each other."""
        names = "tokenizer.path tokenizer.kind"
        if self.path is not None and self.kind == "bytes":
            fix = "Choose tokenizer=sentencepiece or another, or leave tokenizer.path out"
            yield names, "bytes reads no model file", fix
        if self.path is None and self.kind == "hf":
            yield names, "no tokenizer.json is named", "Set tokenizer.path=FILE"
        if self.eos is not None and self.kind != "hf":
            yield "tokenizer.eos tokenizer.kind", "the tokenizer knows its own", "Leave tokenizer.eos out"
