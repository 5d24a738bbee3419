"""Keys of the text, of what becomes of it, and of the tokenizer. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import AUTO, BoolOrAuto, IntOrAuto, key


@dataclass
class DataConfig:
    """Where the text or the tokens come from, and what becomes of them."""

    kind: str = key(
        "embedded",
        "embedded: Python's standard library; local: text files; tokens: prepared shards or nanoGPT's train.bin; "
        "openwebtext, hf: data sets of the Hugging Face hub; mixture: several of these.",
        choices=("embedded", "local", "tokens", "openwebtext", "hf", "mixture"),
    )
    path: Union[str, None] = key(
        None,
        "File, directory or glob of the text (local); directory of shards, or Megatron's file without .bin (tokens).",
    )
    repo: Union[str, None] = key(None, "hf: the data set on the hub, as OWNER/NAME.")
    revision: Union[str, None] = key(
        None, "hf: commit, branch or tag; null is the newest commit. What it was is kept with the run."
    )
    split: str = key(
        "train", "hf: the split that is read: files with its name as a word of their path; all where no file names one."
    )
    files: Union[str, None] = key(
        None, "hf: glob of the files that are read in place of a split, such as sample/10BT/*; a * matches / as well."
    )
    mixture: Union[str, None] = key(
        None,
        "mixture: the sources, as 'NAME WEIGHT KIND WHERE; ...'; KIND is embedded, local, tokens or hf, WHERE a path "
        "or OWNER/NAME@REVISION. Weights are shares of the rows; all else of data.* holds for every source.",
    )
    objective: str = key(
        AUTO,
        "next_token: predict each token of a stretch of text; prefix_continuation: read the beginning of a document, "
        "predict what follows. auto is what the model is made for.",
        choices=(AUTO, "next_token", "prefix_continuation"),
    )
    text_field: str = key("text", "Field of a jsonl line, or column of a parquet file, that holds the text.")
    val_fraction: float = key(
        0.02,
        "Share of the documents held out for validation, chosen by a hash of the document. `evaluate` alone takes 1: "
        "all of the text.",
        above=0,
        maximum=1,
    )
    val_files: Union[str, None] = key(
        None,
        "Text that validates in place of a share of the documents: file, directory or glob (local), or glob of the "
        "data set's files (hf). Prepared text alone.",
    )
    keep_empty: bool = key(
        False, "An empty document is kept, as an eos: where each is a line of a text. Prepared text alone."
    )
    pack: str = key(
        "concat",
        "How documents fill rows. concat: one after the other, cut where a row ends; best_fit: none is cut that fits "
        "into a row, the rest of a row is padding.",
        choices=("concat", "best_fit"),
    )
    document_mask: bool = key(False, "No attention across documents of a row, and positions begin anew with each.")
    streaming: BoolOrAuto = key(
        AUTO, "Tokenize while training instead of preparing all text before; auto: for data sets of the hub."
    )
    streams: int = key(
        192,
        "Virtual streams that the rows of streamed text come from; any number of ranks reads them.",
        minimum=1,
        maximum=65536,
    )
    open_shards: int = key(
        4, "Shards that streams draw from at a time: how far text is shuffled.", minimum=1, maximum=65536
    )
    workers: int = key(
        1, "Processes of each rank that tokenize streamed text; 0 tokenizes in the trainer.", minimum=0, maximum=256
    )
    prefetch: int = key(
        4, "Blocks of some 65,536 tokens that each worker may be ahead of the trainer.", minimum=1, maximum=4096
    )
    on_bad_shard: str = key(
        "raise",
        "A streamed shard that is faulty: raise stops with its name; skip goes on without it and says so.",
        choices=("raise", "skip"),
    )
    cache_gb: float = key(
        50.0, "Decoded text of streamed shards that data.cache holds at most, in GB.", above=0, maximum=1_000_000
    )
    fetch_minutes: float = key(
        10.0, "Minutes that fetching a shard may take, retries included, before the run ends.", above=0, maximum=100_000
    )
    text_gb: Union[float, None] = key(
        None,
        "GB of text in all, uncompressed, of a data set of the hub whose size is known: `plan`, which asks no hub, "
        "counts epochs by it; null: unknown.",
        above=0,
        maximum=1_000_000_000,
    )
    out: Union[str, None] = key(None, "Directory that `prepare` writes; null is the cache, keyed by content.")
    cache: str = key(
        "~/.cache/ngpt_train",
        "Where `train` keeps the shards and tokenizers that it prepares from text, and what torch.compile compiles.",
    )
    shard_tokens: int = key(
        100_000_000, "Tokens per prepared shard; its last document may exceed them.", minimum=1, maximum=100_000_000_000
    )

    prepare_workers: IntOrAuto = key(
        AUTO,
        "Processes that tokenize text for shards, which they do not change; auto: one for each CPU.",
        minimum=1,
        maximum=1024,
    )

    @property
    def held_out_share(self) -> float:
        """Share of the documents of the text itself that validate."""
        return self.val_fraction if self.val_files is None else 0.0

    @property
    def on_hub(self) -> bool:
        return self.kind in ("openwebtext", "hf")

    @property
    def streamed(self) -> bool:
        """Whether text is tokenized while training."""
        return (self.on_hub or self.kind == "mixture") if self.streaming == AUTO else bool(self.streaming)


@dataclass
class TokenizerConfig:
    """Text to ids. The data group chooses it; prepared tokens bring their own."""

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
