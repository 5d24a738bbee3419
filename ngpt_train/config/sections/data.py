"""The keys data.*: where text comes from, and what becomes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Union

from ngpt_train.config.keys import AUTO, BoolOrAuto, Conflict, IntOrAuto, key
from ngpt_train.config.validate import mistake, show
from ngpt_train.core.errors import ConfigError

if TYPE_CHECKING:
    from ngpt_train.config.model_keys import ModelConfig
    from ngpt_train.config.sections.text_to_ids import TokenizerConfig

_MIXED_KINDS = {
    "embedded": "",
    "local": "a file, directory or glob",
    "tokens": "a directory of shards",
    "hf": "OWNER/NAME or OWNER/NAME@REVISION",
}
_FORM = (
    "Write NAME WEIGHT KIND WHERE, with ; or a line break between sources: "
    "data.mixture='web 0.7 local web/; books 0.3 tokens books/'"
)


@dataclass
class DataConfig:
    """Where the text or the tokens come from, and what becomes of them."""

    # Text that has moved is known by its fingerprint.
    may_change: ClassVar = (
        *("path", "val_files", "out", "cache", "text_gb", "cache_gb"),
        *("workers", "prepare_workers", "prefetch", "on_bad_shard", "fetch_minutes"),
    )

    kind: str = key(
        "embedded",
        "embedded: Python's standard library; local: text files; tokens: prepared shards or nanoGPT's train.bin; "
        "openwebtext, hf: data sets of the Hugging Face hub; mixture: several of these.",
        choices=("embedded", "local", "tokens", "openwebtext", "hf", "mixture"),
    )
    path: Union[str, None] = key(
        None, "File, directory or glob of text (local); directory of shards or Megatron's file without .bin (tokens)."
    )
    repo: Union[str, None] = key(None, "hf: the data set on the hub, as OWNER/NAME.")
    revision: Union[str, None] = key(None, "hf: commit, branch or tag; null: the newest commit, which the run keeps.")
    split: str = key("train", "hf: the split: files with its name as a word of their path; all where none has one.")
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
        "predict what follows; masked: predict hidden tokens; label: answer a label; translation: translate. auto is "
        "what the model is made for.",
        choices=(AUTO, "next_token", "prefix_continuation", "masked", "label", "translation"),
    )
    mask_keep: float = key(0.1, "masked: share of the predicted tokens that the model reads.", minimum=0, maximum=1)
    mask_random: float = key(0.1, "masked: share of the predicted tokens read as a random one.", minimum=0, maximum=1)
    mask_words: bool = key(False, "masked: whole words are predicted, or not; a word begins with white space.")
    text_field: str = key(
        "text",
        "Field of a jsonl line, or column of a parquet or tsv file, that holds the text; with data.label_field also "
        "several, as in sentence1,sentence2.",
    )
    label_field: Union[str, None] = key(
        None, "Field or column with the label of an example: the model learns to answer it (docs/objectives.md)."
    )
    translation_field: Union[str, None] = key(
        None, "Field or column with the translation of data.text_field, which an encoder-decoder learns to write."
    )
    task: Union[str, None] = key(None, "Name of the task, for the names of its runs.")
    labels: Union[list[str], None] = key(None, "The labels, in the order of the classes; null: a label is a number.")
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
    val_range: Union[list[float], None] = key(
        None,
        "Of the examples or pairs of data.val_files those whose hash, from 0 to 1, lies in [low, high): [0,0.5] "
        "validates and [0.5,1] is left for a test. null: all.",
        minimum=0,
        maximum=1,
    )
    keep_empty: bool = key(False, "Empty documents stay, as an eos, where each is a line. Prepared text alone.")
    pack: str = key(
        "concat",
        "How documents fill rows. concat: one after the other, cut where a row ends; best_fit: none is cut that fits "
        "into a row, the rest of a row is padding.",
        choices=("concat", "best_fit"),
    )
    document_mask: bool = key(False, "No attention across documents of a row, and positions begin anew with each.")
    streaming: BoolOrAuto = key(AUTO, "Tokenize while training, not all text before; auto: for data sets of the hub.")
    streams: int = key(
        192, "Virtual streams that rows of streamed text come from, on any number of ranks.", minimum=1, maximum=65536
    )
    open_shards: int = key(4, "Shards that streams draw from: how far text is shuffled.", minimum=1, maximum=65536)
    workers: int = key(1, "Processes of a rank that tokenize streamed text; 0: in the trainer.", minimum=0, maximum=256)
    prefetch: int = key(4, "Blocks of some 65,536 tokens that a worker may be ahead.", minimum=1, maximum=4096)
    on_bad_shard: str = key(
        "raise",
        "A streamed shard that is faulty: raise stops with its name; skip goes on without it and says so.",
        choices=("raise", "skip"),
    )
    cache_gb: float = key(50.0, "GB of decoded shards that data.cache holds at most.", above=0, maximum=1_000_000)
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
        AUTO, "Processes that tokenize text for shards, which stay the same; auto: one a CPU.", minimum=1, maximum=1024
    )

    @property
    def held_out_share(self) -> float:
        """Share of the documents of the text itself that validate."""
        return self.val_fraction if self.val_files is None else 0.0

    @property
    def read_field(self) -> str:
        """What a reader reads of a record (sources/readers.py: document_of)."""
        return ",".join(filter(None, [self.text_field, self.label_field or self.translation_field]))

    @property
    def own_ids(self) -> int:
        """Ids of the model beside the tokenizer's: one for masks."""
        return int(self.objective == "masked")

    @property
    def on_hub(self) -> bool:
        return self.kind in ("openwebtext", "hf")

    @property
    def streamed(self) -> bool:
        """Whether text is tokenized while training."""
        return (self.on_hub or self.kind == "mixture") if self.streaming == AUTO else bool(self.streaming)

    def conflicts(self, model: ModelConfig, tokenizer: TokenizerConfig) -> Iterator[Conflict]:
        """Keys that exclude each other. Raises ConfigError for a faulty mixture."""
        texts = self.kind == "mixture" and all(source.data.kind != "tokens" for source in sources_of(self))
        if tokenizer.kind == "words" and tokenizer.from_text and texts:
            fix = "Name a vocabulary with tokenizer.path=FILE, or choose another tokenizer"
            yield "tokenizer.kind data.kind", "the words of a mixture are not counted", fix
        yield from self._source_conflicts()
        if tokenizer.kind == "words" and tokenizer.from_text and self.streamed and self.kind != "mixture":
            fix = "Set data.streaming=false, or name a vocabulary with tokenizer.path=FILE"
            yield "tokenizer.kind data.streaming", "counting the words takes all of the text", fix
        if self.kind == "tokens" and self.streamed:
            fix = "Leave data.streaming out, or choose data=local"
            yield "data.streaming data.kind", "prepared shards are tokens already", fix
        if self.objective != model.objective:
            fix = f"Set data.objective={model.objective}, or choose another model"
            yield "data.objective model.name", "the model is not made for this objective", fix
        if self.objective in ("prefix_continuation", "label", "translation"):
            for name, differs in {"data.pack": self.pack != "concat", "data.document_mask": self.document_mask}.items():
                if differs:
                    yield f"{name} data.objective", "a row is one document or example", f"Leave {name} out"
        yield from self._mask_conflicts()
        yield from self._label_conflicts(model)
        yield from self._translation_conflicts()
        if self.val_range is not None and (len(self.val_range) != 2 or self.val_range[0] >= self.val_range[1]):
            yield "data.val_range", "not a low and a higher end", "For example data.val_range=[0,0.5]"

    def check_val_range(self) -> None:
        """Raises ConfigError if there is nothing that data.val_range is a part of. For `evaluate` this is a run's."""
        if self.val_range is not None and (self.val_files is None or not (self.label_field or self.translation_field)):
            problem = f"data.val_range={show(self.val_range)}: a part of files of examples or pairs that validate"
            raise mistake(problem, "Name these files with data.val_files, or leave it out")

    def _translation_conflicts(self) -> Iterator[Conflict]:
        if self.translation_field is None:
            return
        if self.label_field is not None:
            fix = "Set one of them to null"
            yield "data.translation_field data.label_field", "an example has a label or a translation", fix
        if self.streamed or self.kind in ("mixture", "tokens", "embedded"):
            fix = "Choose data=pairs, or data=hf with data.streaming=false"
            yield "data.translation_field data.kind data.streaming", "pairs are read whole, from files or the hub", fix

    def _label_conflicts(self, model: ModelConfig) -> Iterator[Conflict]:
        """Keys of labels without a label, and what examples cannot be."""
        if self.label_field is None:
            for name in (name for name in ("labels", "task") if getattr(self, name) is not None):
                yield f"data.{name} data.label_field", "there is no label", f"Set data.label_field, or data.{name}=null"
            if model.n_classes is not None:
                fix = "Set data.label_field and data.labels, or model.n_classes=null"
                yield "model.n_classes data.label_field", "there is no label to answer", fix
            if "," in self.text_field:
                problem = "a text has one field, examples with a label have several"
                yield "data.text_field data.label_field", problem, "Name one, or set data.label_field"
            return
        wanted = len(self.labels or [""])
        if find_spec("sklearn") is None:
            yield "data.label_field", "the package scikit-learn is not installed", "pip install 'ngpt-train[eval]'"
        if self.labels is not None and len(set(self.labels)) < max(2, wanted):
            yield "data.labels", "two or more different labels are told apart", "For example data.labels=['0','1']"
        elif model.n_classes != wanted:
            yield "model.n_classes data.labels", f"there are {wanted} labels", f"Set model.n_classes={wanted}"
        if self.streamed or self.kind in ("mixture", "tokens", "embedded"):
            fix = "Choose data=local, or data=hf with data.streaming=false"
            yield "data.label_field data.kind data.streaming", "examples are read whole, from files or the hub", fix

    def _mask_conflicts(self) -> Iterator[Conflict]:
        """Keys of masks without an effect, and what a masked row cannot be."""
        names = ("mask_keep", "mask_random", "mask_words")
        if self.objective != "masked":
            for name in (name for name in names if getattr(self, name) != getattr(DataConfig, name)):
                fix = f"Leave data.{name} out, or choose objective=masked"
                yield f"data.{name} data.objective", f"data.{name} has no effect then", fix
            return
        if self.mask_keep + self.mask_random > 1:
            fix = "Lower one of them, so that both are at most 1 together"
            yield "data.mask_keep data.mask_random", "a predicted token is read as itself or as a random one", fix
        if self.pack == "best_fit" and not self.document_mask:
            fix = "Set data.document_mask=true, or data.pack=concat"
            yield "data.pack data.document_mask", "tokens would attend to padding", fix

    def _source_conflicts(self) -> Iterator[Conflict]:
        """Keys of another kind of source than `kind`, and those that `kind` lacks."""
        kind, path, repo = self.kind, "data.path data.kind", "data.repo data.kind"
        if kind in ("local", "tokens") and self.path is None:
            yield path, "no data is named", "Set data.path=PATH"
        if kind != "mixture" and self.mixture is not None:
            fix = "Choose data=mixture, or leave data.mixture out"
            yield "data.mixture data.kind", "the text is no mixture", fix
        if kind == "mixture" and self.path is not None:
            yield path, "a mixture names the path of each source", "Leave data.path out"
        if kind == "embedded" and self.path is not None:
            fix = "Choose data=local for text or data=tokens for prepared shards"
            yield path, "the embedded text reads no path", fix
        if self.on_hub and self.path is not None:
            yield path, "a data set of the hub reads no path", "Choose data=local for files, or leave data.path out"
        if self.on_hub and self.repo is None:
            yield repo, "no data set is named", "Set data.repo=OWNER/NAME"
        if not self.on_hub and self.repo is not None:
            yield repo, "the text is not read from the hub", "Choose data=hf, or leave data.repo out"
        if not self.on_hub and self.files is not None:
            fix = "Choose data=hf, or set data.files=null; data.path=GLOB names files of your own"
            yield "data.files data.kind", "the text is not read from the hub", fix
        if not self.on_hub and self.text_gb is not None:
            yield "data.text_gb data.kind", "the size of the text is read from the files", "Leave data.text_gb out"
        if self.val_files is not None and kind not in ("local", "hf", "openwebtext"):
            fix = "Choose data=local or data=hf, or leave data.val_files out"
            yield "data.val_files data.kind", "the text has no files to choose from", fix
        for name in ("val_files", "keep_empty"):
            if getattr(self, name) and self.streamed:
                fix = f"Set data.streaming=false, or leave data.{name} out"
                yield f"data.{name} data.kind data.streaming", "text is streamed without it", fix


class SourceConfig(NamedTuple):
    """A source of rows: its name in a mixture, its share of all rows, and where its rows come from."""

    name: str
    share: float
    data: DataConfig


def sources_of(data: DataConfig) -> list[SourceConfig]:
    """The sources of `data.mixture`, their shares adding up to 1; else `data`, without a name. Raises ConfigError."""
    if data.kind != "mixture":
        return [SourceConfig("", 1.0, data)]
    lines = [line.strip() for line in re.split(r"[;\n]", data.mixture or "") if line.strip()]
    if len(lines) < 2:
        raise ConfigError(f"data.mixture={data.mixture or 'null'}: a mixture has two sources or more\n  {_FORM}")
    sources = [_source_of(line, data) for line in lines]
    names = [source.name for source in sources]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"data.mixture: {min(twice)} is the name of two sources\n  {_FORM}")
    total = math.fsum(source.share for source in sources)
    return [source._replace(share=source.share / total) for source in sources]


def is_commit(revision: str) -> bool:
    """Whether `revision` is the hash of a commit, and not a branch or tag, which may move."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def commits_of(data: DataConfig) -> dict[str, str | None]:
    """The revision of each data set of the hub, by the name of its source; without a mixture that name is empty."""
    return {source.name: source.data.revision for source in sources_of(data)}


def with_commits(data: DataConfig, commits: Mapping[str, str | None]) -> DataConfig:
    """`data` with these commits, named as by `commits_of`, where it names no revision, or a branch, which moves."""

    def commit(revision: str | None, name: str) -> str | None:
        return revision if revision and is_commit(revision) else commits.get(name) or revision

    if data.on_hub:
        return replace(data, revision=commit(data.revision, ""))
    if data.kind != "mixture":
        return data
    parts = re.split(r"(\s*[;\n]\s*)", data.mixture or "")
    for index, line in enumerate(parts):
        name, _, kind, where = (*line.split(maxsplit=3), "", "", "", "")[:4]
        revision = where.partition("@")[2]
        if kind == "hf" and (found := commit(revision, name)):
            parts[index] = f"{line.rstrip().removesuffix(f'@{revision}')}@{found}"
    return replace(data, mixture="".join(parts))


def _source_of(line: str, data: DataConfig) -> SourceConfig:
    name, weight, kind, where = (*line.split(maxsplit=3), "", "", "", "")[:4]
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise _mistake(line, f"a name of letters, digits, - and _ comes first, not {name!r}")
    try:
        share = float(weight)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1e9:
        raise _mistake(line, f"a weight above 0 and up to 1e9 follows the name, not {weight!r}")
    if kind not in _MIXED_KINDS:
        raise _mistake(line, f"{kind!r} is none of the kinds {', '.join(_MIXED_KINDS)}")
    if bool(where) != bool(_MIXED_KINDS[kind]):
        raise _mistake(line, f"{kind} needs {_MIXED_KINDS[kind]}" if _MIXED_KINDS[kind] else f"{kind} reads no path")
    own = replace(data, kind=kind, mixture=None, path=None)
    if kind == "hf":
        repo, _, revision = where.partition("@")
        own = replace(own, repo=repo, revision=revision or None)
    elif where:
        own = replace(own, path=where)
    if kind == "tokens":
        own = replace(own, streaming=False)
    return SourceConfig(name, share, own)


def _mistake(line: str, problem: str) -> ConfigError:
    return ConfigError(f"data.mixture: in '{line}' {problem}\n  {_FORM}")
