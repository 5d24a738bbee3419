"""The keys of validation, in training and by `evaluate`, and of the verbs other than `train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from ngpt_train.config.keys import COUNT, COUNT_OR_0, ROWS, SEED, key

# The sentences of keys that `evaluate` and `generate` share.
AVERAGE = (
    "Takes the mean of the weights of so many checkpoints: the run's newest ones, up to the one that is named. "
    "checkpoint.keep_last says how many a run keeps."
)
WEIGHTS = "The trained weights, or their moving average, which a run keeps with optim.ema_decay."


@dataclass
class EvalConfig:
    """Validation during training."""

    every: int = key(500, "Steps between validations; 0 validates at the start and at the end only.", **COUNT_OR_0)
    rows: Union[int, None] = key(
        64, "Rows of the fixed validation set (fewer where the data has fewer); set this or tokens.", **ROWS
    )
    tokens: Union[int, None] = key(
        None,
        "Targets of the fixed validation set, at least (fewer where the data has fewer, which the log says); replaces "
        "rows.",
        minimum=1,
        maximum=10_000_000_000,
    )
    budget: Union[float, None] = key(
        None,
        "Share of the compute between two validations that a validation before the last may take: it then has fewer "
        "of the rows, always the same. null: no limit.",
        above=0,
        maximum=1000,
    )
    contexts: Union[list[int], None] = key(
        None,
        "Row lengths that the model is validated at besides model.context, such as [2048,4096], on the same text as "
        "far as whole rows allow: metrics loss_ctx2048 and so on. null: none.",
        **COUNT,
    )
    tasks: Union[list[str], None] = key(
        None,
        "Tasks of lm-evaluation-harness, such as [arc_easy,piqa], or of tasks_path; tasks=NAME names a list of them. "
        "`evaluate` runs them in place of the validation.",
    )
    tasks_every: Union[int, None] = key(
        None,
        "Steps between evaluations of the tasks in training, which come at the end too; 0: at the end only; null: as "
        "eval.every.",
        **COUNT_OR_0,
    )
    tasks_path: Union[str, None] = key(
        None, "Directory of task files, YAML of lm-evaluation-harness or JSONL, in which a task is looked up first."
    )


@dataclass
class GenerateConfig:
    """Sampling from a checkpoint (`generate`)."""

    checkpoint: Union[str, None] = key(
        None, "Run directory (its newest checkpoint), checkpoint directory, or RUN/best."
    )
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    prompt: str = key("", "Text to continue; empty starts a document.")
    prompts: Union[str, None] = key(
        None,
        "File of prompts: a .jsonl file, whose lines are objects with a `prompt`, or a text file, each line a prompt. "
        "Each gives a line of JSON.",
    )
    interactive: bool = key(False, "Read prompts from the terminal or from stdin, a line each, until it ends.")
    samples: int = key(1, "Texts for each prompt; sample j = 0, 1, ... has the seed generate.seed + j.", **COUNT)
    max_new_tokens: int = key(200, "Tokens to sample at most.", **COUNT)
    min_new_tokens: int = key(0, "Tokens before which the text does not end.", **COUNT_OR_0)
    temperature: float = key(0.8, "Divides the logits; 0 takes the most likely token.", minimum=0, maximum=1000)
    top_k: Union[int, None] = key(None, "Sample among the k most likely tokens; null: all.", **COUNT)
    top_p: Union[float, None] = key(
        None, "Sample among the fewest tokens whose probability reaches p; null: all.", above=0, maximum=1
    )
    min_p: Union[float, None] = key(
        None,
        "Sample among the tokens at least this times as probable as the most probable one; null: all.",
        minimum=0,
        maximum=1,
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
    cache: bool = key(
        True, "Keep the keys and values of earlier tokens; false computes the whole text again for each token."
    )
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


@dataclass
class LengthConfig:
    """The loss by context and by position on whole documents of data.* (`evaluate`, in place of the validation)."""

    contexts: Union[list[int], None] = key(
        None,
        "Tokens that the model reads at most, such as [1024,2048,4096,8192,16384,32768]; null: no such evaluation.",
        **COUNT,
    )
    stride: Union[int, None] = key(
        None,
        "Tokens by which the window moves along a document, which are those that it adds to the loss; null: half of "
        "the context.",
        **COUNT,
    )
    documents: Union[int, None] = key(None, "Documents of the text, the first ones; null: all.", **COUNT)
    rope: list[str] = key(
        ["none"],
        "Angles of RoPE beyond model.context, each of which is evaluated: none (as trained), linear (positions divided "
        "by context / model.context), ntk (a larger base).",
    )


@dataclass
class EvaluateConfig:
    """Validation loss of a checkpoint (`evaluate`) on data.*, eval.rows rows or eval.tokens targets."""

    checkpoint: Union[str, None] = key(
        None, "Run directory (its newest checkpoint), checkpoint directory, or RUN/best."
    )
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    out: Union[str, None] = key(
        None, "JSON file for the result; the loss of each row goes beside it as .npz. null prints only."
    )
    length: LengthConfig = field(default_factory=LengthConfig)


# Memory in GiB that a program sees of a card, rounded down.
CARDS = {"a100_40gb": 39, "a100_80gb": 79, "h100_80gb": 79}


@dataclass
class PlanConfig:
    """Size, memory and time of a run without running it (`plan`)."""

    world_size: int = key(1, "Ranks that the run is planned for.", minimum=1, maximum=10_000_000)
    ranks_per_host: int = key(8, "Ranks of each host, the groups of parallel=hsdp.", minimum=1, maximum=10_000)
    device: Union[str, None] = key(
        None,
        "Card for whose memory micro rows, recomputation and layout are chosen and printed; null keeps those of the "
        "config. The arguments' own are kept.",
        choices=tuple(CARDS),
    )
    flops_per_s: Union[float, None] = key(
        None, "Achieved FLOP/s of one rank, for the hours; null leaves them out.", above=0, maximum=1e30
    )
    out: Union[str, None] = key(None, "JSON file for the plan; null prints only.")


@dataclass
class DoctorConfig:
    """Whether a training run would work here (`doctor`, with the overrides of `train`)."""

    out: Union[str, None] = key(None, "JSON file for what was found, without secrets; null prints only.")
