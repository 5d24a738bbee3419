"""The keys of model.* that architectures share. Each has more of its own in ngpt_train/models/NAME/keys.py.

model.init.* are the standard deviations of the matrices at step 0, and model.init_table is where a recipe has the
starts that were measured at a scale:

    tiny: {init.embedding: 1.0, init.hidden: 1/sqrt(d_model), source: who found them, and how}

`auto` is the table's value for the scale, else the architecture's default, which is its paper's. nGPT's starts are the
`init` and `scale` of its scale vectors, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Union

from ngpt_train.config.keys import (
    AUTO,
    Conflict,
    FloatOrAuto,
    IntOrAuto,
    Table,
    key,
    nearest_divisors,
    nearest_multiples,
)
from ngpt_train.config.validate import show
from ngpt_train.core.constants import Constraint

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

RULES = ("1/sqrt(d_model)", "0.5/sqrt(d_model)")
DIVIDED = "hidden/sqrt(writes)"
KINDS = ("embedding", "output", "hidden", "residual")


@dataclass
class InitConfig:
    """Standard deviations of the matrices at step 0, whose entries are normal. The defaults are GPT-2's and the nGPT
    paper's for its baseline (section A.5); 0.02 was chosen for widths of 1,000 and more."""

    embedding: FloatOrAuto = key(
        0.02,
        "Standard deviation of the input embedding at step 0 (an encoder-decoder has two). auto: the recipe's "
        "model.init_table for the scale, else the paper's.",
        choices=(AUTO, *RULES),
        above=0,
        maximum=1000,
    )
    output: FloatOrAuto = key(
        0.02, "As model.init.embedding, of the output embedding.", choices=(AUTO, *RULES), minimum=0, maximum=1000
    )
    hidden: FloatOrAuto = key(
        0.02,
        "As model.init.embedding, of all matrices but embeddings and the ones of model.init.residual; also of learned "
        "positions.",
        choices=(AUTO, *RULES),
        above=0,
        maximum=1000,
    )
    residual: FloatOrAuto = key(
        DIVIDED,
        "As model.init.embedding, of W_o and W_down, which write into the residual stream. hidden/sqrt(writes) is "
        "hidden's divided by the square root of the number of these matrices: 2 n_layers in a decoder; in an "
        "encoder-decoder 2 n_encoder_layers in the encoder and 3 n_layers in the decoder.",
        choices=(AUTO, "hidden", DIVIDED, *RULES),
        minimum=0,
        maximum=1000,
    )

    def std(self, kind: str, d_model: int, writes: int) -> float:
        """The standard deviation of a matrix of one of KINDS. writes: matrices that write into its residual stream."""
        rule = getattr(self, kind)
        if rule == "hidden":
            return self.std("hidden", d_model, writes)
        if rule == DIVIDED:
            return self.std("hidden", d_model, writes) / math.sqrt(writes)
        if rule in RULES:
            return float(rule.removesuffix("/sqrt(d_model)")) / math.sqrt(d_model)
        return float(rule)


def _problem_of_starts(table: Mapping[Any, Any]) -> str | None:
    """The first mistake in an init_table, and where it is; None for a correct one."""
    return next(_problems_of_starts(table), None) if table else None  # while the schema is made there are no keys yet


def _problems_of_starts(table: Mapping[Any, Any]) -> Iterator[str]:
    from ngpt_train.config.architectures import all_keys, architectures  # which need this file

    starts = dict.fromkeys(name for model in architectures().values() for name in model.starts)
    for scale, entry in table.items():
        if not isinstance(scale, str) or not isinstance(entry, dict):
            yield f"{scale}: must be the name of a scale, and then {{init.embedding: 1.0, source: ...}}"
            continue
        for name, value in entry.items():
            if name == "source":
                problem = None if isinstance(value, str) and value else "must be text"
            elif name in starts:
                problem = all_keys()[f"model.{name}"].problem(value) or ("is no value" if value == AUTO else None)
            else:
                problem = f"is none of {', '.join((*starts, 'source'))}"
            if problem:
                yield f"{scale}: {name} {problem}"


class LrFactors(NamedTuple):
    """Factors of optim.lr, for each kind of parameter."""

    embedding: float  # of the input; an encoder-decoder has two
    hidden: float  # the matrices of the blocks
    output: float  # the output embedding
    vector: float  # gains and scale vectors


@dataclass
class ModelConfig:
    """The keys of every architecture. Subclasses add their own."""

    may_change: ClassVar = ("init_table",)

    name: str = key("gpt", "Architecture, chosen with model=NAME.")
    d_model: int = key(128, "Width of the residual stream.", minimum=1, maximum=1_000_000)
    n_layers: int = key(4, "Number of blocks.", minimum=1, maximum=10_000)
    n_heads: int = key(4, "Attention heads; d_model / n_heads must be even for RoPE.", minimum=1, maximum=1_000_000)
    n_kv_heads: Union[int, None] = key(
        None, "Number of key/value heads (grouped-query attention); null is n_heads.", minimum=1, maximum=1_000_000
    )
    d_mlp: Union[int, None] = key(None, "Hidden width of the MLP; null is 4 * d_model.", minimum=1, maximum=10_000_000)
    vocab_size: IntOrAuto = key(AUTO, "Rows of both embeddings; auto: the tokenizer's.", minimum=2, maximum=10_000_000)
    context: int = key(256, "Tokens per training row.", minimum=1, maximum=10_000_000)
    bidirectional: bool = key(
        False, "Each token attends to all of its row, and predicts itself where it is masked; objective=masked sets it."
    )
    mask_share: float = key(
        0.15, "Of a bidirectional model: share of a row's tokens that it predicts, rounded by chance.", above=0, below=1
    )
    n_classes: Union[int, None] = key(
        None,
        "Classes that the head tells apart, in the place of the vocabulary; 1: it gives a number. data.label_field and "
        "data.labels set it.",
        minimum=1,
        maximum=100_000,
    )
    tied_embeddings: bool = key(False, "One matrix as input and output embedding.")
    rope_base: float = key(10000.0, "Base of the rotary position angles.", above=1, maximum=1e12)
    rope_layout: str = key(
        "half",
        "Which dimensions of a head rotate together: half pairs i with i + d_head/2, interleaved 2i with 2i + 1.",
        choices=("half", "interleaved"),
    )

    embedding_dropout: float = key(
        0.0, "Probability that training drops a value of the embedding, positions included.", minimum=0, below=1
    )
    residual_dropout: float = key(
        0.0, "Probability that training drops a value that attention or the MLP adds to h.", minimum=0, below=1
    )
    attention_dropout: float = key(
        0.0,
        "Probability that training drops a weight of the softmax. Attention then runs without a fused kernel and holds "
        "all weights of a row.",
        minimum=0,
        below=1,
    )

    init: InitConfig = field(default_factory=InitConfig)
    init_table: dict[str, Any] = key(
        {},
        "Starts by scale, for keys that are auto: model.init.*, and of nGPT the init and scale of its scale vectors.",
        table=Table(_problem_of_starts, "{tiny: {init.embedding: 1.0}}", "Set the keys, or write a recipe in YAML"),
    )

    @property
    def d_head(self) -> int:
        """Width of a head: d_k."""
        return self.d_model // self.n_heads

    # What the rest of the house asks an architecture before there is a model. A subclass may answer otherwise.

    @property
    def objective(self) -> str:
        """What data.objective=auto becomes, and the only one that the model learns."""
        return "label" if self.n_classes else "masked" if self.bidirectional else "next_token"

    def refuses_text(self) -> str | None:
        """Why the model continues no text; None if it does."""
        what = {"label": "answers labels", "masked": "fills in masks", "translation": "translates"}.get(self.objective)
        return what and f"the model {what}, and continues no text"

    def predicted(self, context: int) -> int:
        """The most tokens of a row of `context` that have a target."""
        if self.n_classes:
            return 1
        return min(context, int(self.mask_share * context) + 1) if self.bidirectional else context

    # Whether its blocks apply dropout (models/layers/dropout.py).
    applies_dropout: ClassVar[bool] = False

    @property
    def uses_dropout(self) -> bool:
        """Whether training drops anything."""
        return bool(self.embedding_dropout or self.residual_dropout or self.attention_dropout)

    @property
    def rows(self) -> Constraint:
        """Where each step leaves every row of every matrix. Rows that are not free start at length 1."""
        return "free"

    @property
    def uses_rope(self) -> bool:
        """Whether attention turns q and k, so that a head needs an even width."""
        return True

    @property
    def synchronises_statistics(self) -> bool:
        """Whether norms take their statistics over the rows of all ranks."""
        return False

    def refuses_rows_of(self, context: int) -> str | None:
        """Why a model trained on rows of model.context tokens cannot read rows of `context`; None if it can."""
        return "a row is an example with a label, whatever the context" if self.n_classes else None

    def kept_beyond_gpt(self) -> int:
        """About how many values more than a block of GPT a block keeps of each token for its backward pass."""
        return 0

    def source_length(self, context: int) -> int:
        """How many of a row's `context` tokens an encoder reads."""
        return 0

    def lr_factors(self, steps: int) -> LrFactors | None:
        """The factors in a run of `steps` steps. None: all parameters have optim.lr, in one group."""
        return None

    def resolve(self, config: Config) -> None:
        """Replaces what is `auto` or null in the keys of its own, in place. `config` is resolved but for these."""

    # The keys of model.* that say how weights start: they may be auto, and init_table may have them.
    starts: ClassVar[tuple[str, ...]] = tuple(f"init.{kind}" for kind in KINDS)

    def measured_starts(self, scale: str) -> dict[str, Any]:
        """The entry of init_table for `scale`, as far as it holds for this model; empty where there is none."""
        entry = {name: x for name, x in self.init_table.get(scale, {}).items() if name in (*self.starts, "source")}
        if self.tied_embeddings and (output := entry.pop("init.output", None)):
            entry["init.embedding"] = output  # measured for two matrices: with an embedding of 1, logits would be huge
        return entry

    def source_of_starts(self, scale: str) -> str:
        """Who measured the starts; empty unless they are the entry of init_table for `scale`."""
        measured = self.measured_starts(scale)
        follows = all(attrgetter(name)(self) == value for name, value in measured.items() if name in self.starts)
        return str(measured.get("source", "model.init_table")) if measured.keys() - {"source"} and follows else ""

    def paper_start(self, name: str) -> float | str:
        """The value of `name`, one of `starts`, where it is auto and nothing was measured."""
        value: float | str = attrgetter(name)(type(self)())
        return value

    def settle_starts(self, measured: Mapping[str, Any] | None = None) -> None:
        """Replaces, in place, each of `starts` that is auto by the measured value, else the paper's."""
        for name in self.starts:
            if attrgetter(name)(self) == AUTO:
                self._start(name, (measured or {}).get(name, self.paper_start(name)))

    def start_as(self, other: ModelConfig) -> None:
        """Takes, in place, the starts of another config of this architecture."""
        for name in self.starts:
            self._start(name, attrgetter(name)(other))

    def _start(self, name: str, value: float | str) -> None:
        section, _, key = name.partition(".")
        setattr(self, section, replace(getattr(self, section), **{key: value}))  # configs share their defaults

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """(key, key) of model.*: the value of the first leaves the second without an effect."""
        if self.tied_embeddings:
            yield "tied_embeddings", "init.output"
        if not self.bidirectional:
            yield "bidirectional", "mask_share"

    def settle_sizes(self) -> None:
        """Replaces, in place, the sizes that are null."""
        self.n_kv_heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        self.d_mlp = 4 * self.d_model if self.d_mlp is None else self.d_mlp

    def shape_conflicts(self) -> Iterator[Conflict]:
        """Sizes that exclude each other, and keys without an effect. The sizes are settled."""
        assert isinstance(self.n_kv_heads, int)
        pairs = 2 if self.uses_rope else 1  # RoPE turns pairs of a head's dimensions
        if self.d_model % (self.n_heads * pairs):
            width, rest = divmod(self.d_model, self.n_heads)
            odd = f"RoPE needs an even width of each head, this is {width}"
            # As many key/value heads as heads are what auto has become: they follow.
            unit = 1 if self.n_kv_heads == self.n_heads else self.n_kv_heads
            whole = self.d_model // pairs if self.d_model % pairs == 0 else 0
            heads = nearest_divisors("model.n_heads", self.n_heads, whole, unit)
            widths = nearest_multiples("model.d_model", self.d_model, self.n_heads * pairs)
            fix = "\n  ".join(filter(None, [heads, widths]))
            yield "model.n_heads model.d_model", "the heads do not divide the width" if rest else odd, fix
        if self.n_heads % self.n_kv_heads:
            fix = nearest_divisors("model.n_kv_heads", self.n_kv_heads, self.n_heads)
            yield "model.n_kv_heads model.n_heads", "the key/value heads do not divide the heads", fix
        for switch, name in self.without_effect():
            value, default = (attrgetter(name)(of) for of in (self, type(self)()))
            if value not in (default, 0 if default == AUTO else default):
                key, fix = f"model.{name}", f"Leave it out, or set model.{name}={show(default)}"
                yield f"{key} model.{switch}", f"{key} has no effect then", fix

    def dropout_conflicts(self, attention: str) -> Iterator[Conflict]:
        """Dropout that nothing applies. attention: the value of kernels.attention."""
        for name in ("residual_dropout", "attention_dropout"):
            if getattr(self, name) and not self.applies_dropout:
                fix = f"Set model.{name}=0, or have its blocks apply dropout (docs/add_an_architecture.md)"
                yield f"model.{name} model.name", "the blocks of this architecture drop nothing", fix
        if self.attention_dropout and attention not in (AUTO, "sdpa"):
            problem = f"the dropout of {attention} depends on more than seed, step and row"
            fix = "Set kernels.attention=auto, or model.attention_dropout=0"
            yield "model.attention_dropout kernels.attention", problem, fix

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """Keys that exclude each other, one of them the architecture's own. `config` is resolved."""
        yield from ()

    def not_in_weights(self) -> set[str]:
        """Keys of model.* that a run may change although it begins with the weights of another (run.init_from)."""
        dropout = {"embedding_dropout", "residual_dropout", "attention_dropout"}
        return {"context", "init", "init_table", "mask_share"} | dropout
