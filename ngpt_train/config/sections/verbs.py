"""The keys evaluate.*, generate.*, analyze.*, probe.*, export.*, import.*, plan.* and doctor.*: of verbs that read a
checkpoint, a model of another program or a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Union

from ngpt_train.config.keys import AUTO, BEAMS, COUNT, COUNT_OR_0, ROWS, SEED, Conflict, VerbKeys, key
from ngpt_train.config.validate import mistake

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config
    from ngpt_train.config.sections.records import EvalConfig

# The names of analysis/paper_figures.py, which cannot be imported before torch; a test compares them.
FIGURES = (
    *("ngpt_4", "ngpt_5", "ngpt_6", "ngpt_10", "ngpt_11", "ngpt_12", "ngpt_14"),
    *("normformer_3", "normformer_4", "normformer_6", "normformer_7"),
    *("powernorm_2", "powernorm_3", "powernorm_4", "powernorm_6", "tnt_3", "tnt_4"),
)
LIVE_FIGURES = (
    *("ngpt_6_live", "normformer_3_live", "normformer_4_live", "normformer_6_live", "normformer_7_live"),
    *("powernorm_2_live", "powernorm_4_live", "tnt_3_live", "tnt_4_live"),
)
LENGTH_PENALTY = "Of a beam search: log-probabilities are divided by the length to this power."
# The names of interop/layouts/, which cannot be imported before torch; a test compares them.
LAYOUTS = ("llama", "qwen3", "ngpt", "angpt", "roberta", "marian", "safetensors")
# Memory in GiB that a program sees of a card, rounded down.
CARDS = {"a100_40gb": 39, "a100_80gb": 79, "h100_80gb": 79}

# Sentences that several keys share.
AVERAGE = (
    "Takes the mean of the weights of so many checkpoints: the run's newest ones, up to the one that is named. "
    "checkpoint.keep_last says how many a run keeps."
)
WEIGHTS = "The trained weights, or their moving average, which a run keeps with optim.ema_decay."


@dataclass
class CheckpointKeys(VerbKeys):
    """The keys of the verbs that read one checkpoint: `evaluate`, `generate` and `export`."""

    checkpoint: Union[str, None] = key(None, "Run directory (its newest checkpoint), checkpoint directory or RUN/best.")
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))

    def refused(self, config: Config) -> Iterator[Conflict]:
        if self.checkpoint is None:
            fix = f"For example {self.verb}.checkpoint={config.run.example()}"
            yield f"{self.verb}.checkpoint", "no checkpoint is named", fix
        yield from average_of_averages(self.verb, self.average, self.weights)


def average_of_averages(verb: str, average: int, weights: str) -> Iterator[Conflict]:
    """`weights` is the value of VERB.weights, `average` of VERB.average."""
    if average > 1 and weights == "ema":
        fix = f"Set {verb}.average=1 or {verb}.weights=trained"
        yield f"{verb}.average {verb}.weights", "an average of averages", fix


@dataclass
class LengthConfig:
    """The loss by context and by position on whole documents of data.* (`evaluate`, in place of the validation)."""

    contexts: Union[list[int], None] = key(
        None, "Tokens that the model reads at most, such as [1024,4096,16384]; null: no such evaluation.", **COUNT
    )
    stride: Union[int, None] = key(
        None,
        "Tokens by which the window moves along a document: the targets that it adds to the loss; null: half of "
        "the context.",
        **COUNT,
    )
    documents: Union[int, None] = key(None, "Documents of the text, the first ones; null: all.", **COUNT)
    rope: list[str] = key(
        ["none"],
        "Angles of RoPE beyond model.context, each of which is evaluated: none (as trained), linear (positions divided "
        "by context / model.context), ntk (a larger base).",
    )

    def conflicts(self, validation: EvalConfig) -> Iterator[Conflict]:
        """Keys that exclude each other."""
        if self.contexts == []:
            yield "evaluate.length.contexts", "no context", "Name one, as in [1024], or leave it out"
        if self.contexts is not None and validation.tasks is not None:
            yield "evaluate.length.contexts eval.tasks", "two evaluations", "Start one after the other"
        idle = [name for name in ("stride", "documents") if getattr(self, name) is not None]
        idle += ["rope"] if self.rope != ["none"] else []
        if self.contexts is None and idle:
            keys = " ".join(f"evaluate.length.{name}" for name in idle)
            fix = "Name contexts, as in [1024], or leave it out"
            yield f"{keys} evaluate.length.contexts", "no such evaluation", fix
        if not self.rope or not set(self.rope) <= {"none", "linear", "ntk"}:
            yield "evaluate.length.rope", "not a list of none, linear and ntk", "For example [none,ntk]"
        if self.contexts is not None and self.stride is not None and self.stride > min(self.contexts):
            problem = "the window would leave tokens out"
            yield "evaluate.length.stride evaluate.length.contexts", problem, f"At most {min(self.contexts)}"


@dataclass
class EvaluateConfig(CheckpointKeys):
    """Validation loss of a checkpoint (`evaluate`) on data.*, eval.rows rows or eval.tokens targets."""

    verb = "evaluate"

    out: Union[str, None] = key(
        None, "JSON file for the result; the loss of each row goes beside it as .npz. null prints only."
    )
    length: LengthConfig = field(default_factory=LengthConfig)
    beams: Union[int, None] = key(
        None,
        "Of a model that translates: hypotheses of the beam search that translates the held-out pairs, for BLEU and "
        "chrF; 1: greedy. null: the loss alone.",
        **BEAMS,
    )
    length_penalty: float = key(1.0, LENGTH_PENALTY, minimum=0, maximum=100)
    moses: Union[str, None] = key(
        None,
        "With beams, of texts that Moses has tokenized: the language of the translations, such as en. sacrebleu's BLEU "
        "and chrF then see them without its spaces and escapes.",
    )

    def refused(self, config: Config) -> Iterator[Conflict]:
        yield from super().refused(config)
        if self.beams is not None and find_spec("sacrebleu") is None:
            yield "evaluate.beams", "the package sacrebleu is not installed", "pip install 'ngpt-train[eval]'"
        idle = [("moses", self.moses is not None), ("length_penalty", self.length_penalty != 1)]
        for name in [name for name, is_set in idle if is_set and self.beams is None]:
            yield f"evaluate.{name} evaluate.beams", "nothing is translated", "Set evaluate.beams=5, or leave it out"
        for other in ("evaluate.length.contexts", "eval.tasks"):
            if self.beams is not None and attrgetter(other)(config) is not None:
                yield f"evaluate.beams {other}", "two evaluations", "Start one after the other"
        if self.moses is not None and find_spec("sacremoses") is None:
            yield "evaluate.moses", "the package sacremoses is not installed", "pip install 'ngpt-train[eval]'"
        if self.out is not None and self.out.endswith(".npz"):
            fix = f"For example evaluate.out={self.out.removesuffix('.npz')}.json"
            yield "evaluate.out", "the losses of rows take this name, the result is JSON", fix


@dataclass
class GenerateConfig(CheckpointKeys):
    """Sampling from a checkpoint (`generate`)."""

    verb = "generate"

    prompt: str = key("", "Text to continue; empty starts a document.")
    prompts: Union[str, None] = key(
        None,
        "File of prompts: a .jsonl file, whose lines are objects with a `prompt`, or a text file, each line a prompt. "
        "Each gives a line of JSON.",
    )
    beams: int = key(5, "Of a model that translates: hypotheses of the beam search; 1: greedy.", **BEAMS)
    length_penalty: float = key(1.0, LENGTH_PENALTY, minimum=0, maximum=100)
    interactive: bool = key(False, "Read prompts from the terminal or from stdin, a line each, until it ends.")
    samples: int = key(1, "Texts for each prompt; sample j = 0, 1, ... has the seed generate.seed + j.", **COUNT)
    max_new_tokens: Union[int, None] = key(None, "Tokens at most; null: 200, or of a translation half a row.", **COUNT)
    min_new_tokens: int = key(0, "Tokens before which the text does not end.", **COUNT_OR_0)
    temperature: float = key(0.8, "Divides the logits; 0 takes the most likely token.", minimum=0, maximum=1000)
    top_k: Union[int, None] = key(None, "Sample among the k most likely tokens; null: all.", **COUNT)
    top_p: Union[float, None] = key(
        None, "Sample among the fewest tokens whose probability reaches p; null: all.", above=0, maximum=1
    )
    min_p: Union[float, None] = key(
        None, "Sample tokens at least this times as probable as the most probable one; null: all.", minimum=0, maximum=1
    )
    repetition_penalty: float = key(
        1.0,
        "Divides the positive logits of tokens that were read, prompt included, and multiplies the negative; 1: none.",
        above=0,
        maximum=1000,
    )
    no_repeat_ngram_size: int = key(
        0, "No n tokens in a row come twice, prompt included; 0: they may.", minimum=0, maximum=1_000_000
    )
    stop: Union[list[str], None] = key(
        None,
        'Strings before which the text ends, as in \'["\\n\\n","User:"]\', where \\n is a new line, \\t a tab '
        "and \\\\ a backslash. null: none.",
    )
    seed: int = key(0, "Seed of the sampling, the same for each prompt.", **SEED)
    cache: bool = key(True, "Keep the keys and values of earlier tokens; false computes all again for each token.")
    overflow: str = key(
        "slide",
        "Where a text outgrows model.context. slide: the model sees the last model.context tokens, which are computed "
        "again for each token; refuse: such prompts are refused.",
        choices=("slide", "refuse"),
    )
    batch_rows: int = key(8, "Texts that are generated beside each other.", **ROWS)
    logprobs: bool = key(
        False, "Also give the natural log of the model's probability of each token, before temperature and the like."
    )
    out: Union[str, None] = key(None, "JSONL file for the texts, a line each, which must not exist; null prints.")

    @property
    def most_sampled(self) -> int:
        """Tokens."""
        return self.max_new_tokens or 200

    def refused(self, config: Config) -> Iterator[Conflict]:
        yield from super().refused(config)
        self.check_texts()

    def check_texts(self) -> None:
        """Raises ConfigError for keys that exclude each other, and for files that cannot be used."""
        given = [f"generate.{name}" for name in ("prompt", "prompts", "interactive") if getattr(self, name)]
        prompts, out = (None if file is None else Path(file).expanduser() for file in (self.prompts, self.out))
        if len(given) > 1:
            raise mistake(f"{', '.join(given)}: prompts from several places", "Keep one of them")
        if self.interactive and out is not None:
            shown = f"generate.interactive=true, generate.out={self.out}"
            raise mistake(f"{shown}: the texts are printed", "Keep one of them")
        if self.min_new_tokens > self.most_sampled:
            problem = f"generate.min_new_tokens={self.min_new_tokens}: more than generate.max_new_tokens"
            raise mistake(problem, f"Set it to {self.most_sampled} or less")
        if "" in (self.stop or []):
            problem = "generate.stop: an empty string stops every text at once"
            raise mistake(problem, "Leave it out, for example generate.stop='[\"\\n\\n\"]'")
        if prompts is not None and not prompts.is_file():
            problem = f"generate.prompts={self.prompts}: {'it is no file' if prompts.exists() else 'no such file'}"
            raise mistake(problem, "Name a text file with a prompt a line, or a .jsonl file of objects with a `prompt`")
        if out is not None and out.is_file():
            raise mistake(f"generate.out={self.out}: the file exists already", "Remove it, or name another")


class _Checkpoints(VerbKeys):
    """The checks that `analyze` and `probe` share."""

    numbers: ClassVar[str]  # the file beside page.html
    most: ClassVar[float] = float("inf")  # checkpoints
    checkpoints: Union[list[str], None]
    average: int
    weights: str
    out: Union[str, None]

    def refused(self, config: Config) -> Iterator[Conflict]:
        key, checkpoints = f"{self.verb}.checkpoints", self.checkpoints or []
        if not checkpoints:
            yield key, "no checkpoint is named", f"For example {key}=[runs/gpt,runs/ngpt]"
        if len(set(checkpoints)) < len(checkpoints):
            yield key, "one is named twice", "Leave it out"
        if len(checkpoints) > self.most:
            yield key, f"{len(checkpoints)} models, and two can be beside each other", "Name one or two"
        yield from average_of_averages(self.verb, self.average, self.weights)
        out = None if self.out is None else Path(self.out).expanduser()
        if out is not None and (out / "page.html").exists() and not (out / self.numbers).exists():
            problem = f"{out / 'page.html'} is not of an earlier {self.verb}"
            yield f"{self.verb}.out", problem, "Name another directory, or remove it"


@dataclass
class AnalyzeConfig(_Checkpoints):
    """The papers' measurements and figures, from checkpoints and telemetry (`analyze`)."""

    verb, numbers = "analyze", "analysis.json"

    checkpoints: Union[list[str], None] = key(
        None,
        "Run directories (their newest checkpoints), checkpoint directories or RUN/best, such as [runs/gpt,runs/ngpt]. "
        "Ratios are to the first. null: none.",
    )
    figures: list[str] = key(
        ["all"],
        "The figures, by paper and number. all: every one; live: those over steps, which need telemetry records "
        "(logging.telemetry) and no checkpoint.",
        choices=("all", "live", *FIGURES, *LIVE_FIGURES),
    )
    out: Union[str, None] = key(
        None, "Directory for analysis.json, analysis.parquet, figures and page.html; null prints a summary only."
    )
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    rows: int = key(64, "Validation rows of a run's own data for gradients and statistics of batches.", **ROWS)
    batch_rows: int = key(8, "Rows of each batch whose statistics are compared with the running ones.", **ROWS)


@dataclass
class ProbeConfig(_Checkpoints):
    """Where the validation loss of one or two checkpoints is (`probe`), on data.* and eval.rows."""

    verb, numbers, most = "probe", "probe.json", 2

    checkpoints: Union[list[str], None] = key(
        None, "One or two runs, checkpoint directories or RUN/best, such as [runs/gpt,runs/ngpt]. null: none."
    )
    out: Union[str, None] = key(None, "Directory for probe.json and page.html; null prints a summary only.")
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    show: int = key(10, "Rows to show: where two models differ most, or one model's hardest.", **COUNT)


@dataclass
class ExportConfig(CheckpointKeys):
    """A checkpoint for other programs (`export`)."""

    verb = "export"

    out: Union[str, None] = key(None, "Directory for the model, which must not exist or be empty.")
    layout: str = key(
        AUTO,
        "How the model is written. llama: LlamaForCausalLM of transformers, for GPT; qwen3: Qwen3ForCausalLM, for GPT "
        "with model.qk_norm; ngpt: nGPT, with a file of its own that transformers runs; angpt: Qwen3ForCausalLM, with "
        "anGPT's factors absorbed; safetensors: any model, under the names of docs/weights.md; auto: the first that "
        "can.",
        choices=(AUTO, *LAYOUTS),
    )
    dtype: str = key("fp32", "Of the written weights, to which they are rounded.", choices=("fp32", "bf16", "fp16"))
    max_shard_gb: float = key(5.0, "Most GB (1e9 bytes) of a file of weights; more are split.", above=0, maximum=1e6)
    rows: int = key(4, "Rows of random ids that compare written model and checkpoint.", minimum=1, maximum=1000)

    def refused(self, config: Config) -> Iterator[Conflict]:
        yield from super().refused(config)
        if self.out is None:
            yield "export.out", "no directory is named", "For example export.out=exported/model"


@dataclass
class ImportConfig(VerbKeys):
    """A model of another program as a run (`import`)."""

    verb = "import"

    source: Union[str, None] = key(
        None,
        "Directory of a model that `export` or save_pretrained of transformers wrote; OWNER/NAME on the hub; or the "
        "ckpt.pt of NVIDIA's public nGPT code, with tokenizer=NAME.",
    )
    revision: Union[str, None] = key(None, "Branch, tag or commit of a model on the hub; null: its main branch.")
    out: Union[str, None] = key(None, "Run directory to make, which must not exist or be empty.")

    def refused(self, config: Config) -> Iterator[Conflict]:
        if self.source is None:
            fix = "For example import.source=exported/model, or import.source=HuggingFaceTB/SmolLM2-135M"
            yield "import.source", "no model is named", fix
        if self.out is None:
            yield "import.out", "no directory is named", "For example import.out=runs/imported"


@dataclass
class PlanConfig(VerbKeys):
    """Size, memory and time of a run without running it (`plan`)."""

    world_size: int = key(1, "Ranks that the run is planned for.", minimum=1, maximum=10_000_000)
    ranks_per_host: int = key(8, "Ranks of each host, the groups of parallel=hsdp.", minimum=1, maximum=10_000)
    device: Union[str, None] = key(
        None,
        "Card for whose memory micro rows, recomputation and layout are chosen and printed, but for your arguments; "
        "null keeps the config's.",
        choices=tuple(CARDS),
    )
    flops_per_s: Union[float, None] = key(
        None, "Achieved FLOP/s of one rank, for the hours; null leaves them out.", above=0, maximum=1e30
    )
    out: Union[str, None] = key(None, "JSON file for the plan; null prints only.")


@dataclass
class DoctorConfig(VerbKeys):
    """Whether a training run would work here (`doctor`, with the overrides of `train`)."""

    out: Union[str, None] = key(None, "JSON file for what was found, without secrets; null prints only.")
